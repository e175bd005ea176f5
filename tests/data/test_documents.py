"""Documents: normalising, duplicates, the split."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.data.documents import Document, cut_into_sections, drop_duplicates, normalise, split_documents


def _verse(start: int, lines: int) -> str:
    return "".join(f"this is line number {number} of a long poem\n" for number in range(start, start + lines))


def test_normalise_gives_one_spelling_of_line_ends_and_spaces() -> None:
    assert normalise("\ufeffone  \r\ntwo\r\r\n\n\n\n\nthree\t\n\n") == "one\ntwo\n\n\nthree\n"


@given(st.text(alphabet=" a\r\n\t", max_size=60))
def test_normalise_is_stable(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


def test_exact_and_near_duplicates_are_dropped_and_named() -> None:
    documents = [
        Document("b", _verse(0, 40)),
        Document("a", _verse(0, 40)),
        Document("second edition", _verse(0, 30) + _verse(500, 5)),
        Document("answer", _verse(30, 10) + _verse(900, 20)),
    ]
    kept, dropped = drop_duplicates(documents)
    assert [document.name for document in kept] == ["a", "answer"]
    assert dropped == [("b", "a"), ("second edition", "a")]


def test_short_documents_without_long_lines_are_only_compared_whole() -> None:
    documents = [Document("x", "yes\n"), Document("y", "no\n"), Document("z", "no\n")]
    kept, dropped = drop_duplicates(documents)
    assert [document.name for document in kept] == ["x", "y"]
    assert dropped == [("z", "y")]


def test_the_split_follows_content_and_seed_and_not_names_or_order() -> None:
    documents = [Document(f"d{number}", _verse(number * 100, 20)) for number in range(30)]
    split = split_documents(documents, validation_fraction=0.2, seed=1)
    renamed = [Document("new" + d.name, d.text) for d in reversed(documents)]
    again = split_documents(renamed, validation_fraction=0.2, seed=1)
    assert [d.digest for d in again.validation] == [d.digest for d in split.validation]
    assert [d.digest for d in again.train] == [d.digest for d in split.train]
    other = split_documents(documents, validation_fraction=0.2, seed=2)
    assert {d.digest for d in other.validation} != {d.digest for d in split.validation}
    expected = min(documents, key=lambda d: hashlib.sha256(f"1:{d.digest}".encode()).digest())
    assert split.validation[0] == expected


@given(st.lists(st.integers(1, 400), min_size=2, max_size=40), st.floats(0.01, 0.5))
def test_a_split_loses_nothing_and_keeps_near_its_share(sizes: list[int], fraction: float) -> None:
    documents = [Document(str(number), f"{number}" + "x" * size) for number, size in enumerate(sizes)]
    split = split_documents(documents, validation_fraction=fraction, seed=3)
    assert split.train
    assert split.validation
    assert sorted(d.name for d in split.train + split.validation) == sorted(d.name for d in documents)
    total, held = sum(d.size for d in documents), sum(d.size for d in split.validation)
    largest = max(d.size for d in documents)
    assert held <= max(fraction * total + largest / 2, split.validation[0].size)


def test_one_document_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="two documents"):
        split_documents([Document("a", "text")], validation_fraction=0.1, seed=1)


def test_a_long_text_is_cut_at_empty_lines_and_loses_no_word() -> None:
    text = "\n\n".join(_verse(number, 3) for number in range(100))
    sections = cut_into_sections(Document("book.txt", text), size=1000)
    assert len(sections) > 5
    assert [section.name for section in sections[:2]] == ["book.txt#1", "book.txt#2"]
    assert " ".join(s.text for s in sections).split() == text.split()
