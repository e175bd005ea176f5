"""Reads a job file or a ``--set`` argument into a tree, with every problem at its place.

Scalars follow the YAML 1.2 core rules, not 1.1: ``3e-4`` is a number; ``on``, ``off``, ``yes``, ``no``
and ``12:30`` are text. Duplicate keys, foreign tags, and documents made to exhaust memory are refused.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from serai.errors import Problem
from serai.spec.tree import Entry, Layer, Mapping, Node, Place, Scalar, Sequence, Source

__all__ = ["MAX_BYTES", "MAX_DEPTH", "MAX_NODES", "Reader", "problem_at", "scalar_value"]

MAX_BYTES = 256 << 10
MAX_DEPTH = 40
MAX_NODES = 20_000
"""Bounds of one document after its aliases are followed; a real job file is a hundred times smaller."""

_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_HEX = re.compile(r"0x[0-9a-fA-F_]+")
_OCTAL = re.compile(r"0o[0-7_]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")
_TAG = "tag:yaml.org,2002:"


def scalar_value(text: str) -> bool | int | float | str | None:
    """What an unquoted scalar means."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text[0] in "tT"
    if _INT.fullmatch(text) and len(text) < 40:
        return int(text.replace("_", ""))
    for pattern, base in ((_HEX, 16), (_OCTAL, 8)):
        if pattern.fullmatch(text) and len(text) < 40 and text[2:].strip("_"):
            return int(text[2:].replace("_", ""), base)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if infinite := _INFINITE.fullmatch(text):
        return -math.inf if infinite[1] == "-" else math.inf
    if _NAN.fullmatch(text):
        return math.nan
    return text


def problem_at(
    place: Place,
    code: str,
    message: str,
    *,
    key: str | None = None,
    expected: str | None = None,
    next_step: str | None = None,
) -> Problem:
    """A problem that points at a place."""
    return Problem(
        code=code,
        message=message,
        file=place.source.name,
        line=place.line,
        column=place.column,
        width=place.width,
        key=key or None,
        source=place.text,
        expected=expected,
        next_step=next_step,
    )


@dataclass
class Reader:
    """Reads sources; ``problems`` gathers what was wrong with them, ``texts`` the files by path."""

    problems: list[Problem] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    _nodes: int = 0

    def read_file(self, path: str, layer: Layer) -> Mapping | None:
        """The tree of a YAML file, or ``None`` with the reason among the problems."""
        text = self._read_text(path)
        if text is None:
            return None
        self.texts[path] = text
        folder = os.path.dirname(os.path.abspath(path))
        source = Source(name=path, lines=tuple(_lines(text)), folder=folder, layer=layer)
        node = self._parse(text, source)
        if node is None:
            return None
        if not isinstance(node, Mapping):
            empty = isinstance(node, Scalar) and node.value is None
            self.problems.append(
                problem_at(
                    Place(source, 1, 1) if empty else node.place,
                    "S107",
                    "the file holds nothing"
                    if empty
                    else f"the file holds {describe_node(node)} at its top level",
                    expected="keys and values, such as `serai: 1`",
                    next_step="serai init NAME writes a job file to start from",
                )
            )
            return None
        return node

    def read_value(self, text: str, source: Source, column: int) -> Node | None:
        """The value of a ``--set`` argument, which starts at ``column`` of the source's one line."""
        return self._parse(" " * (column - 1) + text, source)

    def _read_text(self, path: str) -> str | None:
        def refuse(
            code: str,
            message: str,
            expected: str,
            next_step: str | None = None,
            *,
            line: int | None = None,
            column: int | None = None,
        ) -> None:
            self.problems.append(
                Problem(
                    code=code,
                    message=message,
                    file=path,
                    line=line,
                    column=column,
                    expected=expected,
                    next_step=next_step,
                )
            )

        try:
            if os.path.isdir(path):
                inside = os.path.join(path, "job.yaml")
                hint = f"give {inside}" if os.path.isfile(inside) else "give a file, such as job.yaml"
                refuse("S108", f"{path} is a folder", "a job file", hint)
                return None
            if not os.path.isfile(path) and os.path.exists(path):
                refuse("S108", f"{path} is no ordinary file", "a job file")
                return None
            with open(path, "rb") as stream:
                raw = stream.read(MAX_BYTES + 1)
        except FileNotFoundError:
            near = _near_files(path)
            hint = f"give {near}" if near else "serai init NAME makes a folder with a job file"
            refuse("S108", f"{path} does not exist", "a job file", hint)
            return None
        except PermissionError:
            refuse("S108", f"{path} may not be read", "a file with read permission", f"chmod u+r {path}")
            return None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            refuse("S108", f"{path} cannot be read: {reason}", "a job file")
            return None
        if len(raw) > MAX_BYTES:
            refuse(
                "S110",
                f"{path} is larger than {MAX_BYTES >> 10} KiB",
                "a job file of a few hundred lines at most",
            )
            return None
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            before = raw[: error.start]
            line_start = before.rfind(b"\n") + 1
            refuse(
                "S109",
                f"{path} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start}",
                "UTF-8 text",
                f"iconv -f LATIN1 -t UTF-8 {path}" if b"\0" not in raw else "save it as UTF-8 in your editor",
                line=before.count(b"\n") + 1,
                column=len(before[line_start:].decode("utf-8", "replace")) + 1,
            )
            return None

    def _parse(self, text: str, source: Source) -> Node | None:
        """Parses text whose first line is the source's first line."""
        self._nodes = 0
        try:
            if not self._bounded(text, source):
                return None
            loader = yaml.SafeLoader(text)
            try:
                node = loader.get_single_node()
            finally:
                loader.dispose()
            if node is None:
                return Scalar(None, "", True, Place(source, source.first_line, 1))
            return self._convert(node, source, ())
        except yaml.reader.ReaderError as error:
            before = _lines(text[: error.position])
            place = Place(source, len(before) - 1 + source.first_line, len(before[-1]) + 1)
            character = (
                error.character if isinstance(error.character, int) else ord(str(error.character)[:1] or "?")
            )
            message = f"the character U+{character:04X} may not stand in YAML"
            self.problems.append(
                problem_at(place, "S104", message, expected="printable text", next_step="remove it")
            )
        except yaml.MarkedYAMLError as error:
            self.problems.append(_syntax_problem(error, source))
        except _Refused as refused:
            self.problems.append(refused.problem)
        return None

    def _bounded(self, text: str, source: Source) -> bool:
        """Walks the events, which needs no recursion, before the nodes are built, which does."""
        depth = 0
        documents = 0
        for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            place = _place(event, source)
            if count > 2 * MAX_NODES:
                self.problems.append(
                    problem_at(
                        place,
                        "S110",
                        f"more than {MAX_NODES:,} values",
                        expected="a job file, which has a hundred values or so",
                    )
                )
                return False
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self.problems.append(
                        problem_at(
                            place,
                            "S118",
                            "a second YAML document starts here",
                            expected="one document a file",
                            next_step="put it into a file of its own",
                        )
                    )
                    return False
            elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
                depth += 1
                if depth > MAX_DEPTH:
                    self.problems.append(
                        problem_at(
                            place,
                            "S110",
                            f"values are nested more than {MAX_DEPTH} deep",
                            expected="a job file, which nests three or four deep",
                        )
                    )
                    return False
            elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                depth -= 1
        return True

    def _convert(self, node: yaml.Node, source: Source, parents: tuple[yaml.Node, ...]) -> Node:
        place = _place(node, source)
        self._nodes += 1
        if self._nodes > MAX_NODES or any(parent is node for parent in parents):
            raise _Refused(
                problem_at(
                    place,
                    "S110",
                    "an alias that contains itself"
                    if any(parent is node for parent in parents)
                    else f"more than {MAX_NODES:,} values once aliases are followed",
                    expected="a job file, which has a hundred values or so",
                )
            )
        inside = (*parents, node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, source, place)
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, place, "seq")
            return Sequence(tuple(self._convert(item, source, inside) for item in node.value), place)
        self._check_tag(node, place, "map")
        return self._mapping(node, source, place, inside)

    def _mapping(
        self, node: yaml.Node, source: Source, place: Place, inside: tuple[yaml.Node, ...]
    ) -> Mapping:
        entries: dict[str, Entry] = {}
        inherited: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            key_place = _place(key_node, source)
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(
                    problem_at(key_place, "S118", "a key that is a list or a mapping", expected="a name")
                )
                continue
            key = key_node.value
            value = self._convert(value_node, source, inside)
            if key == "<<" and key_node.style is None:
                bases = value.items if isinstance(value, Sequence) else (value,)
                for base in reversed(bases):
                    if isinstance(base, Mapping):
                        inherited.update(base.entries)
                    else:
                        self.problems.append(
                            problem_at(
                                base.place,
                                "S118",
                                f"`<<` merges {describe_node(base)}",
                                expected="a mapping, or a list of mappings",
                            )
                        )
                continue
            if key in entries:
                first = entries[key].key
                self.problems.append(
                    problem_at(
                        key_place,
                        "S105",
                        f"`{key}` is given twice; the first is on line {first.line}",
                        key=key,
                        expected="each key once",
                        next_step=f"remove line {first.line} or this one",
                    )
                )
                continue
            entries[key] = Entry(key_place, value)
        return Mapping(place, {**inherited, **entries})

    def _scalar(self, node: yaml.ScalarNode, source: Source, place: Place) -> Scalar:
        text = str(node.value)
        plain = node.style is None
        tag = node.tag.removeprefix(_TAG)
        explicit = _explicit_tag(node, source)
        if not explicit:
            return Scalar(scalar_value(text) if plain else text, text, plain, place)
        if tag == "str":
            return Scalar(text, text, False, place)
        if tag in ("int", "float", "bool", "null"):
            value = scalar_value(text)
            if tag == "float" and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            kinds: dict[str, type | tuple[type, ...]] = {
                "int": int,
                "float": float,
                "bool": bool,
                "null": type(None),
            }
            if isinstance(value, kinds[tag]) and not (tag == "int" and isinstance(value, bool)):
                return Scalar(value, text, True, place)
            self.problems.append(
                problem_at(place, "S118", f"`!!{tag}` on {text!r}", expected=f"a value of type {tag}")
            )
            return Scalar(None, text, True, place)
        self._check_tag(node, place, "str")
        return Scalar(text, text, False, place)

    def _check_tag(self, node: yaml.Node, place: Place, usual: str) -> None:
        if node.tag.removeprefix(_TAG) != usual:
            shown = node.tag.replace(_TAG, "!!")
            self.problems.append(
                problem_at(
                    place,
                    "S118",
                    f"the YAML tag `{shown}`",
                    expected="plain YAML: text, numbers, true, false, null, lists and mappings",
                    next_step="remove the tag",
                )
            )


class _Refused(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def describe_node(node: Node) -> str:
    """``the text 'abc'``, ``the number 3``, ``a list`` …, as messages name what stands in a file."""
    if isinstance(node, Mapping):
        return "a mapping"
    if isinstance(node, Sequence):
        return "a list"
    value = node.value
    if value is None:
        return "nothing" if node.text == "" else "null"
    if isinstance(value, str):
        shown = value if len(value) <= 60 else value[:57] + "..."
        return f"the text {shown!r}"
    return f"the {'boolean' if isinstance(value, bool) else 'number'} {node.text}"


def _lines(text: str) -> list[str]:
    """Lines as YAML counts them."""
    return re.split(r"\r\n|[\n\r\x85\u2028\u2029]", text)


def _place(node: Any, source: Source) -> Place:
    start, end = node.start_mark, node.end_mark
    line = start.line + source.first_line
    text = source.lines[start.line] if start.line < len(source.lines) else ""
    block = isinstance(node, (yaml.MappingNode, yaml.SequenceNode)) and not node.flow_style
    if block:
        width = len(re.split(r"\s#|:\s|:$", text[start.column :], maxsplit=1)[0].rstrip())
    elif end.line == start.line:
        width = end.column - start.column
    else:
        width = len(text.rstrip()) - start.column
    return Place(source, line, start.column + 1, max(1, width))


def _explicit_tag(node: yaml.ScalarNode, source: Source) -> bool:
    """Whether a tag was written: the mark of a tagged scalar starts at its tag."""
    mark = node.start_mark
    text = source.lines[mark.line] if mark.line < len(source.lines) else ""
    rest = text[mark.column :]
    if rest.startswith("&"):
        rest = rest.partition(" ")[2].lstrip()
    return rest.startswith("!")


def _syntax_problem(error: yaml.MarkedYAMLError, source: Source) -> Problem:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return Problem(code="S104", message=str(error.problem), file=source.name)
    index = min(mark.line, max(0, len(source.lines) - 1))
    text = source.lines[index] if source.lines else ""
    column = mark.column + 1 if index == mark.line else len(text) + 1
    place = Place(source, index + source.first_line, column)
    indent = text[: len(text) - len(text.lstrip())]
    if "\t" in indent or text[mark.column : mark.column + 1] == "\t":
        tab = text.index("\t")
        return problem_at(
            Place(source, place.line, tab + 1),
            "S104",
            "a tab in the indentation",
            expected="spaces: YAML forbids tabs there",
            next_step="replace the tab by two spaces",
        )
    message = str(error.problem or "malformed YAML")
    if error.context:
        message += f" ({error.context}"
        if error.context_mark is not None and error.context_mark.line != mark.line:
            message += f" that starts on line {error.context_mark.line + source.first_line}"
        message += ")"
    return problem_at(place, "S104", f"YAML syntax: {message}", expected=_syntax_hint(error))


def _syntax_hint(error: yaml.MarkedYAMLError) -> str | None:
    problem = str(error.problem)
    if "mapping values are not allowed" in problem:
        return "one `key: value` a line; a value with `: ` in it stands in quotes"
    if "could not find expected ':'" in problem:
        return "`key: value`, with a colon and a space"
    if "undefined alias" in problem:
        return "an anchor (`&name`) before its alias (`*name`)"
    if "cannot start any token" in problem:
        return "a value that starts with such a character stands in quotes"
    if "expected <block end>" in problem:
        return "the same indentation for keys of one mapping"
    if "end of stream" in problem or "stream end" in problem:
        return "every bracket, brace and quote to be closed"
    return None


def _near_files(path: str) -> str | None:
    """A YAML file beside a path that does not exist, if there is one of a similar name, or only one."""
    import difflib

    folder = os.path.dirname(path) or "."
    try:
        names = [name for name in os.listdir(folder) if name.endswith((".yaml", ".yml"))]
    except OSError:
        return None
    near = difflib.get_close_matches(os.path.basename(path), names, n=1, cutoff=0.6)
    chosen = near[0] if near else names[0] if len(names) == 1 else None
    return os.path.join(os.path.dirname(path), chosen) if chosen else None
