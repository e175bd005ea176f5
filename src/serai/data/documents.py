"""Documents: what a corpus consists of, without duplicates, split into training and validation.

The split is by whole document and by content, so that no sentence that was trained on is validated on.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

__all__ = ["Document", "Split", "cut_into_sections", "drop_duplicates", "normalise", "split_documents"]

_NEAR_DUPLICATE = 0.5
_SHORT_LINE = 20


@dataclass(frozen=True)
class Document:
    """One text with a name for people; ``digest`` is the sha256 of its UTF-8 bytes."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes in UTF-8."""
        return len(self.text.encode())


@dataclass(frozen=True)
class Split:
    """Documents to train on and documents held out, each in the order of the plan."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]


def normalise(text: str) -> str:
    """Unix line ends, no byte order mark, no spaces at line ends, at most two empty lines in a row."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    kept: list[str] = []
    empty = 0
    for line in lines:
        line = line.rstrip()
        empty = 0 if line else empty + 1
        if empty <= 2:
            kept.append(line)
    return "\n".join(kept).strip("\n") + "\n"


def drop_duplicates(documents: Iterable[Document]) -> tuple[list[Document], list[tuple[str, str]]]:
    """Keep one of each text; returns what is kept and ``(dropped, of)`` names.

    A document is dropped if half of its long lines (20 characters and more, case and spaces ignored)
    stand in one larger document, which catches a second edition or an anthology. The largest of its kind
    is kept; the order of what is kept is by name.
    """
    kept: list[Document] = []
    dropped: list[tuple[str, str]] = []
    by_digest: dict[str, Document] = {}
    owner: dict[int, int] = {}  # hash of a line → index in `kept` of the document that had it first
    for document in sorted(documents, key=lambda d: (-d.size, d.name)):
        original = by_digest.setdefault(document.digest, document)
        lines = _line_hashes(document.text)
        shared = Counter(owner[line] for line in lines if line in owner)
        for index, count in shared.most_common(1):
            if original is document and count >= _NEAR_DUPLICATE * len(lines):
                original = kept[index]
        if original is not document:
            dropped.append((document.name, original.name))
            continue
        for line in lines:
            owner.setdefault(line, len(kept))
        kept.append(document)
    return sorted(kept, key=lambda d: d.name), sorted(dropped)


def cut_into_sections(document: Document, *, size: int = 16_384) -> list[Document]:
    """One long text as documents of about ``size`` characters, cut at empty lines.

    For text of which there is only one file: neighbouring sections still tell of the same things, but no
    sentence is on both sides of a split.
    """
    sections: list[str] = []
    current = ""
    for paragraph in document.text.split("\n\n"):
        current += paragraph + "\n\n"
        if len(current) >= size:
            sections.append(current)
            current = ""
    if current.strip():
        sections.append(current)
    return [
        Document(f"{document.name}#{number}", normalise(text))
        for number, text in enumerate(sections, start=1)
    ]


def split_documents(documents: Sequence[Document], *, validation_fraction: float, seed: int) -> Split:
    """Hold out whole documents until they make up ``validation_fraction`` of the bytes.

    The order is that of a seeded hash of each content, so neither names nor the order of files matter.
    Both sides have at least one document; ``documents`` must hold two.
    """
    if len(documents) < 2:
        raise ValueError("a split needs two documents")
    ordered = sorted(documents, key=lambda d: hashlib.sha256(f"{seed}:{d.digest}".encode()).digest())
    wanted = validation_fraction * sum(d.size for d in ordered)
    held = 0
    count = 0
    # A document is held out while that brings the share nearer to the one asked for.
    while count < len(ordered) - 1 and (count == 0 or held + ordered[count].size / 2 <= wanted):
        held += ordered[count].size
        count += 1
    return Split(train=tuple(ordered[count:]), validation=tuple(ordered[:count]))


def _line_hashes(text: str) -> set[int]:
    return {
        xxhash.xxh3_64_intdigest(" ".join(line.lower().split()).encode())
        for line in text.splitlines()
        if len(line.strip()) >= _SHORT_LINE
    }
