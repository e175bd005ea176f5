"""Job file + what it extends + ``--set`` → one frozen spec that knows where every value came from."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from serai.errors import Problem, SpecError
from serai.spec.document import JobSpec
from serai.spec.fields import list_keys, yaml_text
from serai.spec.overrides import read_overrides
from serai.spec.source import Reader, describe_node, problem_at
from serai.spec.tree import Layer, Mapping, Scalar, merge
from serai.spec.tree import Sequence as ListNode
from serai.spec.validate import absolute_path, check_version, lookup, validate

__all__ = ["Provenance", "ResolvedSpec", "load_resolved", "resolve"]

_MAX_CHAIN = 16


@dataclass(frozen=True)
class Provenance:
    """Where the value of one key came from.

    Attributes:
        value: the value as YAML text.
        layer: default, extends, job file or --set.
        where: ``file:line:column``; for a default, empty or the preset that holds it.
    """

    value: str
    layer: Layer
    where: str


@dataclass(frozen=True)
class ResolvedSpec:
    """A valid job, ready to run.

    Attributes:
        path: the job file, as it was given.
        text: the job file, as it was written.
        document: every value, defaults included, paths absolute.
        provenance: key path → where its value came from, for every key of the job.
        overrides: the ``--set`` arguments.
    """

    path: str
    text: str
    document: JobSpec
    provenance: dict[str, Provenance]
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.document.name

    @property
    def folder(self) -> Path:
        """The job file's folder, absolute."""
        return Path(self.path).absolute().parent

    def to_json(self) -> dict[str, Any]:
        """What ``resolved.json`` holds; ``load_resolved`` reads it back."""
        return {"schema_version": 1, **self.document.to_json()}


def resolve(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> ResolvedSpec:
    """Reads a job file, what it extends and the ``--set`` arguments (``a.b=value``).

    Precedence: defaults < ``extends`` < job file < ``--set``. Mappings merge, lists are replaced.

    Raises:
        SpecError: with every problem of every file and argument at once.
    """
    shown = os.fspath(path)
    reader = Reader()
    tree = _read_chain(shown, reader)
    override = read_overrides(overrides, reader)
    problems = reader.problems
    if tree is None:
        raise _error(shown, problems)
    if override is not None:
        tree = merge(tree, override)
    version = check_version(tree)
    if version is not None:
        raise _error(shown, [*problems, version])
    document, invalid = validate(tree)
    problems.extend(invalid)
    problems.extend(_missing_files(tree))
    if problems or document is None:
        raise _error(shown, problems)
    return ResolvedSpec(
        path=shown,
        text=reader.texts[shown],
        document=document,
        provenance=_provenance(tree, document),
        overrides=tuple(overrides),
    )


def load_resolved(path: str | os.PathLike[str]) -> JobSpec:
    """Reads back a ``resolved.json``; keys that this version does not know are left out.

    Raises:
        SpecError: S126 when it cannot be read as a job.
    """
    shown = os.fspath(path)
    try:
        document = json.loads(Path(shown).read_text(encoding="utf-8"))
        return JobSpec.from_stored(document)
    except (
        OSError,
        UnicodeDecodeError,
        json.JSONDecodeError,
        ValidationError,
        TypeError,
        AttributeError,
    ) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise SpecError(
            f"the stored spec cannot be read: {first}",
            code="S126",
            where=shown,
            expected="a resolved.json that serai wrote",
            next_step="run the job file again: serai run job.yaml",
        ) from error


def _read_chain(path: str, reader: Reader) -> Mapping | None:
    """A job file over everything that it extends, or ``None`` when one of them cannot be read."""
    chain: list[Mapping] = []
    seen: list[str] = []
    layer = Layer.JOB_FILE
    while True:
        seen.append(os.path.realpath(path))
        tree = reader.read_file(path, layer)
        if tree is None:
            return None
        chain.append(tree.without("extends"))
        entry = tree.entries.get("extends")
        if entry is None:
            break
        node = entry.value
        if not isinstance(node, Scalar) or not isinstance(node.value, str) or not node.value:
            reader.problems.append(
                problem_at(
                    node.place,
                    "S111",
                    f"`extends` is {describe_node(node)}",
                    key="extends",
                    expected="the path of one YAML file, relative to this one",
                    next_step="write `extends: base.yaml`",
                )
            )
            break
        base = os.path.normpath(os.path.join(os.path.dirname(path), os.path.expanduser(node.value)))
        problem: str | None = None
        if os.path.realpath(base) in seen:
            names = [*seen[seen.index(os.path.realpath(base)) :], os.path.realpath(base)]
            problem = "files extend each other in a circle: " + " → ".join(
                os.path.basename(name) for name in names
            )
        elif not os.path.isfile(base):
            problem = f"`extends` names {base}, which " + (
                "is a folder" if os.path.isdir(base) else "does not exist"
            )
        elif len(chain) >= _MAX_CHAIN:
            problem = f"a chain of more than {_MAX_CHAIN} files that extend each other"
        if problem is not None:
            reader.problems.append(
                problem_at(
                    node.place,
                    "S111",
                    problem,
                    key="extends",
                    expected="a chain of YAML files that ends",
                    next_step="remove `extends`, or correct its path (it is relative to the file that holds it)",
                )
            )
            break
        path = base
        layer = Layer.EXTENDS
    merged = chain.pop()
    while chain:
        merged = merge(merged, chain.pop())
    return merged


def _missing_files(tree: Mapping) -> list[Problem]:
    """Files that the job names and that are not there; found before anything starts."""
    problems = []
    script = lookup(tree, "script")
    if (
        script is not None
        and isinstance(script.value, Scalar)
        and script.value.text
        and script.value.value is not None
    ):
        node = script.value
        path = absolute_path(node.text, node.place.source.folder)
        if not os.path.isfile(path):
            problems.append(
                problem_at(
                    node.place,
                    "S116",
                    f"the script {node.text} " + ("is a folder" if os.path.isdir(path) else "does not exist"),
                    key="script",
                    expected=f"a Python file at {path}",
                    next_step="correct the path; it is relative to the file that holds it",
                )
            )
    text = lookup(tree, "data.text")
    if text is not None and isinstance(text.value, ListNode):
        for index, item in enumerate(text.value.items):
            if not isinstance(item, Scalar) or not item.text:
                continue
            pattern = absolute_path(item.text, item.place.source.folder)
            if not os.path.exists(pattern) and not glob.glob(pattern, recursive=True):
                problems.append(
                    problem_at(
                        item.place,
                        "S116",
                        f"no file matches {item.text}",
                        key=f"data.text.{index}",
                        expected=f"text files at {pattern}",
                        next_step="correct the path; it is relative to the file that holds it",
                    )
                )
    return problems


def _provenance(tree: Mapping, document: JobSpec) -> dict[str, Provenance]:
    values = document.to_json()
    found: dict[str, Provenance] = {}
    for key in list_keys():
        if key.section:
            continue
        value: Any = values
        try:
            for part in key.path.split("."):
                value = value[part]
        except KeyError:
            continue  # a section that this job does not have
        entry = lookup(tree, key.path)
        if entry is None or (
            isinstance(entry.value, Scalar) and entry.value.value is None and value is not None
        ):
            preset = (
                document.model.preset
                if key.path.startswith("model.") and document.model is not None
                else None
            )
            named = preset is not None and key.path not in ("model.preset", "model.family")
            found[key.path] = Provenance(yaml_text(value), Layer.DEFAULT, f"preset {preset}" if named else "")
        else:
            place = entry.value.place
            found[key.path] = Provenance(yaml_text(value), place.source.layer, str(place))
    return found


def _error(path: str, problems: list[Problem]) -> SpecError:
    """All problems in the order of the files' lines, those of the job file first."""
    files = list(dict.fromkeys(problem.file for problem in problems))
    files.sort(key=lambda name: (name == "--set", name != path))
    ordered = sorted(
        dict.fromkeys(problems),
        key=lambda problem: (files.index(problem.file), problem.line or 0, problem.column or 0),
    )
    first = ordered[0]
    count = len(ordered)
    return SpecError(
        first.message if count == 1 else f"{path} has {count} problems",
        code=first.code if count == 1 else "S100",
        where=first.where if count == 1 else path,
        expected=first.expected if count == 1 else None,
        next_step=first.next_step if count == 1 else None,
        problems=ordered,
    )
