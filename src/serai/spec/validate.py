"""From a merged tree to a ``JobSpec``: every problem at once, each at the place of the value that is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from serai.checkpoint.config import CheckpointConfig
from serai.config import RULE_ERROR, BrokenRule
from serai.errors import Problem
from serai.spec.document import LATER_SECTIONS, PATH_KEYS, SPEC_VERSION, JobSpec, section_rules
from serai.spec.fields import (
    SpecKey,
    describe_annotation,
    find_key,
    item_of,
    model_of,
    section_of,
    suggest_key,
    takes_null,
    takes_text,
)
from serai.spec.source import describe_node, problem_at
from serai.spec.tree import Entry, Mapping, Node, Place, Scalar, Sequence

__all__ = ["check_version", "key_place", "lookup", "plain_document", "validate"]

_OUT_OF_RANGE = (
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "string_pattern_mismatch",
    "string_too_short",
    "string_too_long",
    "too_short",
    "too_long",
    "finite_number",
)


def check_version(tree: Mapping) -> Problem | None:
    """A problem when the file says it is written in another version of the format."""
    entry = tree.entries.get("serai")
    if entry is None:
        return None
    node = entry.value
    if isinstance(node, Scalar) and type(node.value) is int and node.value == SPEC_VERSION:
        return None
    return problem_at(
        node.place,
        "S106",
        f"`serai` is {describe_node(node)}: this serai reads job files of version {SPEC_VERSION}",
        key="serai",
        expected=f"serai: {SPEC_VERSION}",
        next_step="pip install --upgrade serai"
        if isinstance(node, Scalar) and isinstance(node.value, int) and node.value > SPEC_VERSION
        else f"write `serai: {SPEC_VERSION}`",
    )


def validate(tree: Mapping) -> tuple[JobSpec | None, list[Problem]]:
    """The spec that a tree describes, or ``None`` and every reason why it describes none."""
    try:
        return JobSpec.model_validate(plain_document(tree)), []
    except ValidationError as error:
        problems: list[Problem] = []
        if not any(details["type"] == RULE_ERROR and not details["loc"] for details in error.errors()):
            # pydantic asks for these rules only when everything else holds; people want to know now
            problems.extend(_broken_rule(tree, "", rule) for rule in _section_rules_of(tree))
        grouped: dict[str, list[ErrorDetails]] = {}
        for details in error.errors(include_url=False):
            grouped.setdefault(_known_path(tree, details["loc"]), []).append(details)
        for path, group in grouped.items():
            problems.extend(_explain(tree, path, group))
        return None, problems


def plain_document(tree: Mapping) -> dict[str, Any]:
    """The tree as plain values, each scalar read as its key wants it, paths made absolute."""
    return _plain_mapping(tree, JobSpec, "")


def lookup(tree: Mapping, path: str) -> Entry | None:
    """The entry at a dotted path; list items have the list's key place."""
    node: Node = tree
    entry: Entry | None = None
    for part in path.split("."):
        if isinstance(node, Mapping) and part in node.entries:
            entry = node.entries[part]
        elif (
            entry is not None
            and isinstance(node, Sequence)
            and part.isdigit()
            and int(part) < len(node.items)
        ):
            entry = Entry(entry.key, node.items[int(part)])
        else:
            return None
        node = entry.value
    return entry


def key_place(tree: Mapping, path: str) -> Place:
    """Where to point for a key that is not there: the nearest section above it that is."""
    while path:
        entry = lookup(tree, path)
        if entry is not None:
            return entry.key
        path = path.rpartition(".")[0]
    return tree.place


def _plain_mapping(node: Mapping, model: type[BaseModel] | None, prefix: str) -> dict[str, Any]:
    fields = model.model_fields if model is not None else {}
    document: dict[str, Any] = {}
    for key, entry in node.entries.items():
        annotation = fields[key].annotation if key in fields else None
        inner = model_of(annotation) if annotation is not None else None
        if inner is not None and isinstance(entry.value, Scalar) and entry.value.value is None:
            continue  # `checkpoint:` with every line below commented out means the defaults
        document[key] = _plain(entry.value, annotation, f"{prefix}{key}")
    return document


def _plain(node: Node, annotation: Any, path: str) -> Any:
    if isinstance(node, Mapping):
        return _plain_mapping(node, model_of(annotation), f"{path}.")
    if isinstance(node, Sequence):
        return [_plain(item, item_of(annotation), path) for item in node.items]
    value = node.value
    if annotation is not None and takes_text(annotation) and node.plain and not isinstance(value, str):
        value = None if value is None and (takes_null(annotation) or not node.text) else node.text
    if path in PATH_KEYS and isinstance(value, str):
        return absolute_path(value, node.place.source.folder)
    return value


def absolute_path(text: str, folder: str) -> str:
    """A path from a job file, made absolute; a storage URL, or nothing, as it is."""
    if "://" in text or not text:
        return text
    return os.path.normpath(os.path.join(folder, os.path.expanduser(text)))


def _known_path(tree: Mapping, location: tuple[int | str, ...]) -> str:
    """The location without the names that pydantic gives to branches of a union."""
    path: list[str] = []
    for index, part in enumerate(location):
        last = index == len(location) - 1
        if lookup(tree, ".".join([*path, str(part)])) is not None or (
            last and isinstance(part, str) and section_of(".".join(path)) is not None
        ):
            path.append(str(part))
    return ".".join(path)


def _explain(tree: Mapping, path: str, group: list[ErrorDetails]) -> Iterator[Problem]:
    kinds = [details["type"] for details in group]
    if RULE_ERROR in kinds:
        for details in group:
            for rule in details.get("ctx", {}).get("broken", ()):
                yield _broken_rule(tree, path, rule)
    elif "extra_forbidden" in kinds:
        yield _unknown_key(tree, path)
    elif "missing" in kinds and lookup(tree, path) is None:
        yield _missing_key(tree, path)
    else:
        yield _wrong_value(tree, path, group)


def _broken_rule(tree: Mapping, path: str, rule: BrokenRule) -> Problem:
    key = ".".join(part for part in (path, rule.key) if part)
    entry = lookup(tree, key) if key else None
    if entry is None:
        place = key_place(tree, key)
    else:
        whole = isinstance(entry.value, Mapping) or not rule.key or _is_null(entry.value)
        place = entry.key if whole else entry.value.place
    return problem_at(
        place, rule.code, rule.message, key=key, expected=rule.expected, next_step=rule.next_step
    )


def _section_rules_of(tree: Mapping) -> Iterator[BrokenRule]:
    present = {key for key, entry in tree.entries.items() if not _is_null(entry.value)}
    checkpoint = tree.entries.get("checkpoint")
    keys = set(checkpoint.value.entries) if checkpoint and isinstance(checkpoint.value, Mapping) else set()
    yield from section_rules(present, checkpoint=keys & set(CheckpointConfig.model_fields))


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.value is None


def _unknown_key(tree: Mapping, path: str) -> Problem:
    parent, _, last = path.rpartition(".")
    entry = lookup(tree, path)
    place = entry.key if entry is not None else key_place(tree, parent)
    if not parent and last in LATER_SECTIONS:
        return problem_at(
            place,
            "S117",
            f"`{last}` is not supported in this version of serai",
            key=path,
            expected="only keys that do something",
            next_step=f"remove `{last}`",
        )
    near = suggest_key(path)
    known = find_key(near) if near else None
    section = section_of(parent)
    names = ", ".join(section.model_fields) if section is not None else ""
    if known is not None:
        beside = known.path.rpartition(".")[0] == parent
        shown = known.path.rpartition(".")[2] if beside else known.path
        expected = f"`{shown}`: {known.kind}. {known.description}"
        step = f"perhaps you meant `{shown}`" + ("" if beside else f", which stands {_stands(known.path)}")
    else:
        expected = f"one of: {names}"
        step = f"remove `{last}`; this version does not know it"
    owner = f"in `{parent}`" if parent else "in a job file"
    return problem_at(
        place, "S101", f"there is no key `{last}` {owner}", key=path, expected=expected, next_step=step
    )


def _stands(path: str) -> str:
    parent = path.rpartition(".")[0]
    return f"under `{parent}:`" if parent else "at the top level"


def _missing_key(tree: Mapping, path: str) -> Problem:
    parent, _, last = path.rpartition(".")
    known = find_key(path)
    where = f"`{parent}` has no `{last}`" if parent else f"`{last}` is missing"
    example = {"serai": "serai: 1", "name": "name: my-run", "train.steps": "steps: 1000"}.get(
        path, f"{last}: ..."
    )
    return problem_at(
        key_place(tree, parent),
        "S103",
        where,
        key=path,
        expected=f"{known.kind}: {known.description}" if known else None,
        next_step=f"add `{example}`" + (f" under `{parent}:`" if parent else ""),
    )


def _wrong_value(tree: Mapping, path: str, group: list[ErrorDetails]) -> Problem:
    entry = lookup(tree, path)
    known = find_key(path)
    if entry is None or known is None:
        place = key_place(tree, path)
        return problem_at(place, "S102", group[0]["msg"], key=path)
    node = entry.value
    place = entry.key if isinstance(node, Mapping) else node.place
    kinds = {details["type"] for details in group}
    ranged = bool(kinds & set(_OUT_OF_RANGE)) or kinds == {"literal_error"}
    expected = known.kind
    is_item = path != known.path
    if is_item:
        expected = describe_annotation(item_of(known.annotation))
    if known.path == "name" and ranged:
        expected = "letters, digits, `.`, `_` and `-`, a letter or digit first, 63 at most"
    return problem_at(
        place,
        "S113" if ranged else "S102",
        f"`{path}` is {describe_node(node)}",
        key=path,
        expected=expected,
        next_step=_hint(known, node, is_item),
    )


def _hint(known: SpecKey, node: Node, is_item: bool) -> str:
    """The line to write instead, where it can be guessed; else where to read about the key."""
    last = known.path.rpartition(".")[2]
    if isinstance(node, Scalar) and not is_item:
        value, text = node.value, node.text
        if known.choices and value is not None:
            import difflib

            near = difflib.get_close_matches(text.lower(), known.choices, n=1, cutoff=0.5)
            if near:
                return f"perhaps you meant `{last}: {near[0]}`"
        if known.kind.startswith("true or false") and text.lower() in ("yes", "on", "no", "off", "y", "n"):
            truth = "true" if text.lower() in ("yes", "on", "y") else "false"
            return f"write `{last}: {truth}`; `{text}` is text in YAML 1.2"
        if (
            not node.plain
            and isinstance(value, str)
            and known.kind.startswith(("an integer", "a number", "true"))
        ):
            return f"write `{last}: {text}`, without quotes"
        if known.kind.startswith("an integer") and isinstance(value, float) and value == int(value):
            return f"write `{last}: {int(value)}`"
        if known.kind.startswith("a list") and value is not None:
            return f"write `{last}: [{text}]`"
    return f"serai explain {known.path}"
