"""A YAML document as a tree in which every key and value knows its place, and how such trees merge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Entry", "Layer", "Mapping", "Node", "Place", "Scalar", "Sequence", "Source", "merge"]


class Layer(StrEnum):
    """Where a value comes from, weakest first."""

    DEFAULT = "default"
    EXTENDS = "extends"
    JOB_FILE = "job file"
    SET = "--set"


@dataclass(frozen=True)
class Source:
    """A text that was read.

    Attributes:
        name: what messages call it: the path as it was written, or ``--set``.
        lines: its lines, without line ends.
        folder: what relative paths in it start from, absolute.
        first_line: number of the first line (the how-manieth ``--set`` it is).
    """

    name: str
    lines: tuple[str, ...]
    folder: str
    layer: Layer
    first_line: int = 1


@dataclass(frozen=True)
class Place:
    """Part of one line of a source; ``line`` and ``column`` count from 1."""

    source: Source
    line: int
    column: int
    width: int = 1

    @property
    def text(self) -> str:
        index = self.line - self.source.first_line
        return self.source.lines[index] if 0 <= index < len(self.source.lines) else ""

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Scalar:
    """A single value: what YAML makes of it, and the text as it was written (unquoted)."""

    value: bool | int | float | str | None
    text: str
    plain: bool
    place: Place


@dataclass(frozen=True)
class Sequence:
    items: tuple[Node, ...]
    place: Place


@dataclass(frozen=True)
class Entry:
    """A key with its own place, and its value."""

    key: Place
    value: Node


@dataclass(frozen=True)
class Mapping:
    place: Place
    entries: dict[str, Entry] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def without(self, key: str) -> Mapping:
        return Mapping(self.place, {name: entry for name, entry in self.entries.items() if name != key})


Node = Scalar | Sequence | Mapping


def merge(weak: Mapping, strong: Mapping) -> Mapping:
    """The strong mapping over the weak one: mappings merge key by key, everything else is replaced."""
    entries = dict(weak.entries)
    for key, entry in strong.entries.items():
        below = entries.get(key)
        if below is not None and isinstance(below.value, Mapping) and isinstance(entry.value, Mapping):
            entries[key] = Entry(entry.key, merge(below.value, entry.value))
        else:
            entries[key] = entry
    return Mapping(strong.place, entries)
