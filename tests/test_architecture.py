"""The rules of the house, held by reading the source: floors, circles, names, sizes, codes, words."""

from __future__ import annotations

import ast
import fnmatch
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import serai

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/serai"

# Arrows only go up this list: a later floor may import an earlier one, never the other way round.
FLOORS = (
    ("errors", "units", "events", "context", "config"),
    ("storage",),
    ("checkpoint",),
    ("integrations",),
    ("data",),
    ("plan",),
    ("train",),
    ("environment",),
    ("track",),
    ("evaluate", "serve"),
    ("spec",),
    ("run",),
    ("bench",),
    ("studio",),
    ("cli",),
)
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
GROUND = set(FLOORS[0])
# The job file is composed of the rooms' own config models, so spec reads them wherever they stand.
CONFIGS = re.compile(r"serai\.\w+\.config$")
LARGEST_FILE = 800


@dataclass(frozen=True)
class Import:
    """``importer`` needs ``imported`` (dotted names). ``now``: when it is imported itself."""

    importer: str
    imported: str
    line: int
    now: bool


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = ("serai", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imports() -> list[Import]:
    return [found for name, path in modules().items() for found in imports_of(name, path)]


def imports_of(name: str, path: Path) -> Iterator[Import]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST, now: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno, now)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(name, full if full in modules() else base, node.lineno, now)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, False)
            for child in node.orelse:
                yield from visit(child, now)
        else:
            inside = now and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inside)

    return visit(tree(path), True)


def room(name: str) -> str:
    return [*name.split("."), ""][1]


def test_every_room_has_a_floor() -> None:
    assert {room(name) for name in modules()} - {"", "__main__"} <= set(FLOOR_OF)


def test_arrows_only_look_down() -> None:
    wrong = []
    for found in imports():
        above, below = room(found.importer), room(found.imported)
        if not found.imported.startswith("serai.") or above in ("", "__main__") or below not in FLOOR_OF:
            continue
        if above == "spec" and CONFIGS.match(found.imported):
            continue
        level, target = FLOOR_OF[above], FLOOR_OF[below]
        if level < target or (level == target and above != below and above not in GROUND):
            wrong.append(f"{found.importer}:{found.line} imports {found.imported}, which stands above it")
    assert wrong == []


def test_a_config_needs_only_the_ground_floor_and_other_configs() -> None:
    wrong = [
        f"{found.importer}:{found.line} imports {found.imported}"
        for found in imports()
        if CONFIGS.match(found.importer)
        and found.imported.startswith("serai.")
        and room(found.imported) not in GROUND
        and not CONFIGS.match(found.imported)
        and found.now
    ]
    assert wrong == []


def test_no_circles() -> None:
    needs: dict[str, set[str]] = {name: set() for name in modules()}
    for found in imports():
        if found.now and found.imported in needs and found.imported != found.importer:
            needs[found.importer].add(found.imported)
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            pytest.fail("import circle: " + " -> ".join([*trail[trail.index(name) :], name]))
        if name not in done:
            for needed in sorted(needs[name]):
                walk(needed, (*trail, name))
            done.add(name)

    for name in sorted(needs):
        walk(name, ())


def test_only_known_packages_are_imported() -> None:
    """A new dependency is a decision: it goes to pyproject.toml first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *(r for e in project["optional-dependencies"].values() for r in e)]
    distributions = {re.split(r"[\s\[<>=!~;]", requirement)[0].lower() for requirement in declared}
    modules_of = {"pyyaml": "yaml", "pydantic": "pydantic", "flask-cors": "flask_cors"}
    known = {modules_of.get(name, name.replace("-", "_")) for name in distributions}
    known |= set(sys.stdlib_module_names) | {"serai", "pydantic_core", "annotated_types", "click"}
    unknown = {
        f"{found.importer}:{found.line} imports {found.imported}"
        for found in imports()
        if found.imported.split(".")[0] not in known
    }
    assert unknown == set()


def test_public_names() -> None:
    assert serai.__all__ == [
        "RNG",
        "Checkpointer",
        "Keep",
        "Restored",
        "SaveHandle",
        "__version__",
        "load",
        "verify",
    ]
    for name in serai.__all__:
        assert getattr(serai, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = serai.nothing


@pytest.mark.parametrize(
    "statement", ["import serai", "import serai.cli.main", "import serai.run, serai.plan"]
)
def test_torch_is_not_loaded_before_it_is_used(statement: str) -> None:
    script = f"{statement}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    loaded = set(json.loads(result.stdout))
    assert not loaded & {"torch", "transformers", "tokenizers", "mlflow", "ray", "obstore", "moto"}


def source_files() -> list[Path]:
    return sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("scripts/**/*.py")])


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in source_files()}
    assert {name: length for name, length in lengths.items() if length > LARGEST_FILE} == {}


def raised_codes() -> dict[str, str]:
    """Code → where it stands, over every ``code="S…"``, ``default_code`` and ``Problem("S…")``."""
    found: dict[str, str] = {}
    for name, path in modules().items():
        for node in ast.walk(tree(path)):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and re.fullmatch(r"S\d{3}", value):
                found.setdefault(value, f"{name}:{node.lineno}")
    return found


def test_every_code_is_explained_and_every_explanation_is_used() -> None:
    explanations = tomllib.loads((SOURCE / "explanations.toml").read_text())
    raised = raised_codes()
    assert {code: where for code, where in raised.items() if code not in explanations} == {}
    assert set(explanations) - set(raised) == set()
    assert list(explanations) == sorted(explanations)
    for code, entry in explanations.items():
        assert list(entry) == ["title", "rule", "reason", "fix"], code
        assert all(len(text) >= 10 for text in entry.values()), code


def test_data_files_are_part_of_the_package() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    left_out = []
    for path in SOURCE.rglob("*"):
        is_module = path.suffix == ".py" and (path.parent / "__init__.py").exists()
        if path.is_dir() or is_module or path.suffix == ".pyc":
            continue
        package = path.parent
        while not (package / "__init__.py").exists():
            package = package.parent
        inside = str(path.relative_to(package))
        if not any(fnmatch.fnmatch(f"/{inside}", f"/{p}".replace("**/", "*")) for p in patterns):
            left_out.append(str(path.relative_to(ROOT)))
    assert left_out == []


def tracked_texts() -> dict[str, str]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    texts = {}
    for name in filter(None, listing.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix not in (".png", ".jpg", ".gif"):
            texts[name] = path.read_text()
    return texts


def test_nothing_belongs_to_one_machine() -> None:
    """No path or host of the machine it was written on; written apart so that this file passes too."""
    foreign = re.compile(
        "|".join(
            ["/wo" + "rk/", "/ro" + "ot/", "/opt/py" + "pi", "/home/[a-z]+/", r"\bpy" + r"pi\.(?!org)\w+"]
        )
    )
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout: this is an unpacked archive")
    hits = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in tracked_texts().items()
        for number, line in enumerate(text.splitlines(), 1)
        if foreign.search(line)
    ]
    assert hits == []
