"""``--set a.b=value``: one grammar for overrides, typed by the spec."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from serai.spec.fields import find_key, takes_null, takes_text
from serai.spec.source import Reader, problem_at
from serai.spec.tree import Entry, Layer, Mapping, Node, Place, Scalar, Source, merge

__all__ = ["read_overrides"]

_DEEPEST = 8
_SEGMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*|[0-9]+")


def read_overrides(arguments: Sequence[str], reader: Reader) -> Mapping | None:
    """One tree of all ``--set`` arguments, later ones stronger; ``None`` when there are none.

    A key that takes text takes everything behind the ``=`` as it is; every other value is YAML
    (``--set train.betas=[0.9,0.99]``). Relative paths start from the current folder.
    """
    merged: Mapping | None = None
    for number, argument in enumerate(arguments, start=1):
        tree = _read_one(argument, number, reader)
        if tree is not None:
            merged = tree if merged is None else merge(merged, tree)
    return merged


def _read_one(argument: str, number: int, reader: Reader) -> Mapping | None:
    source = Source("--set", (argument,), os.getcwd(), Layer.SET, first_line=number)
    key, equals, text = argument.partition("=")

    def refuse(column: int, width: int, message: str, expected: str, next_step: str | None = None) -> None:
        place = Place(source, number, column, max(1, width))
        reader.problems.append(
            problem_at(place, "S112", message, key=key, expected=expected, next_step=next_step)
        )

    if not equals:
        refuse(
            1,
            len(argument),
            f"`--set {argument}` has no `=`",
            "--set KEY=VALUE",
            f"--set {key or 'train.steps'}=...",
        )
        return None
    if "\n" in argument:
        refuse(1, len(key), "a value of several lines", "one line; lists are written [a, b]")
        return None
    segments = key.split(".")
    if len(segments) > _DEEPEST:
        refuse(
            1,
            len(key),
            f"a key of {len(segments)} parts",
            "two or three parts, such as data.tokenizer.vocab_size",
        )
        return None
    column = 1
    places = []
    for segment in segments:
        if not _SEGMENT.fullmatch(segment):
            message = "an empty key" if not segment.strip() else f"`{segment}` cannot be a key"
            refuse(column, len(segment), message, "keys joined by dots, such as train.learning_rate")
            return None
        places.append(Place(source, number, column, len(segment)))
        column += len(segment) + 1
    if segments[0] in ("extends", "serai"):
        refuse(1, len(key), f"`{segments[0]}` cannot be set on the command line", "it stands in the job file")
        return None
    value = _read_value(key, text, source, column, reader)
    if value is None:
        return None
    node: Node = value
    for segment, place in zip(reversed(segments), reversed(places), strict=True):
        node = Mapping(place, {segment: Entry(place, node)})
    assert isinstance(node, Mapping)
    return node


def _read_value(key: str, text: str, source: Source, column: int, reader: Reader) -> Node | None:
    place = Place(source, source.first_line, min(column, len(source.lines[0])), max(1, len(text)))
    known = find_key(key)
    if known is not None and known.path == key and takes_text(known.annotation):
        if text in ("null", "~") and takes_null(known.annotation):
            return Scalar(None, text, True, place)
        return Scalar(text, text, True, place)
    if not text.strip():
        return Scalar(None, "", True, place)
    return reader.read_value(text, source, column)
