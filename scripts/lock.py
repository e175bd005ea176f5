"""Writes requirements/dev.lock: the exact versions, installed here, of all that serai and its extras need.

    make lock        # in .venv, after changing pyproject.toml: pip install -e '.[all,dev]' first

The lock is used as constraints, so a machine with another build of torch takes that build's own
dependencies beside it. Local version labels (``+cpu``) are left out for the same reason.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements/dev.lock"
HEADER = """\
# Exact versions of the development environment, used as constraints: pip install -c requirements/dev.lock ...
# Written by scripts/lock.py (`make lock`); do not edit by hand.
"""


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Name → version of every installed distribution that ``requirements`` lead to."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = list(requirements)
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        extras = frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            sys.exit(
                f"{requirement} is not installed here\n  next: {sys.executable} -m pip install -e '.[all,dev]'"
            )
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            sys.exit(f"{name} {distribution.version} is installed, but {requirement} is wanted")
        found[name] = Version(distribution.version).public
        for text in distribution.requires or []:
            needed = Requirement(text)
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in (extras or {""})
            ):
                pending.append(needed)
    return found


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra, requirements in project["optional-dependencies"].items():
        if extra != "all":
            wanted += requirements
    # An extra of our own ("serai[transformers]") is a name for requirements that are listed anyway.
    found = closure([r for r in map(Requirement, wanted) if canonicalize_name(r.name) != project["name"]])
    LOCK.write_text(HEADER + "".join(f"{name}=={found[name]}\n" for name in sorted(found)))
    print(f"{LOCK.relative_to(ROOT)}: {len(found)} packages")


if __name__ == "__main__":
    main()
