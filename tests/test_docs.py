"""What the documents say exists: commands, targets, links, job files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click
import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def code_in(document: Path) -> str:
    return "\n".join(found[0] for found in CODE.finditer(document.read_text()))


def command_paths() -> set[str]:
    from serai.cli.main import app

    found: set[str] = set()

    def walk(command: click.Command, path: str) -> None:
        found.add(path)
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{path} {name}".strip())

    walk(typer.main.get_command(app), "")
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_documents_exist(document: Path) -> None:
    code = code_in(document)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|[`$ ])make ([a-z]+)\b", code, re.MULTILINE)) <= targets
    paths = command_paths()
    groups = {path.split()[0] for path in paths if " " in path}
    for first, second in re.findall(r"(?:^|[`$&] ?)serai ([a-z]+)(?: ([a-z]+))?", code, re.MULTILINE):
        path = f"{first} {second}" if first in groups and second else first
        assert path in paths, f"{document.name} mentions `serai {path}`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs/decisions"
    listed = set(re.findall(r"\((\d{4}-[^)]+)\)", (folder / "README.md").read_text()))
    assert listed == {path.name for path in folder.glob("[0-9]*.md")}


@pytest.mark.parametrize("job", sorted(ROOT.glob("examples/*.yaml")), ids=lambda path: path.name)
def test_example_jobs_are_valid(job: Path) -> None:
    from serai.spec.resolve import resolve

    assert resolve(str(job), ()).name == job.stem


def test_the_lock_satisfies_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "requirements/dev.lock").read_text().splitlines() if line[:1] != "#"]
    pins = {Requirement(line).name: next(iter(Requirement(line).specifier)).version for line in lines}
    assert all(line == f"{name}=={pins[name]}" for line, name in zip(lines, pins, strict=True))
    wanted = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name != project["name"]:
            assert requirement.specifier.contains(pins[name]), f"{requirement} against {name}=={pins[name]}"
