"""What ``serai init`` makes: a folder with a job, a script of your own and the job that runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from serai.errors import EnvironmentFault, SpecError
from serai.spec.document import NAME_PATTERN
from serai.spec.schema import job_schema

__all__ = ["Created", "create"]

_FILES = {
    "job.yaml": "trains a small language model on Shakespeare over two processes",
    "script.yaml": "runs train.py, a plain PyTorch script, the same way",
    "train.py": "the script: it saves and resumes in three lines",
    "README.md": "what to type",
}
_LONGEST = 56
"""Characters of NAME, so that NAME-script still names a run."""
_SCHEMA = "serai.schema.json"


@dataclass(frozen=True)
class Created:
    """The folder and its files, each with what it is for."""

    folder: Path
    files: dict[str, str]


def create(name: str) -> Created:
    """Makes the folder ``name`` whole or not at all; it must not exist yet, or be empty.

    Raises:
        SpecError: S154 the name cannot name runs, S155 there is something at that place already.
        EnvironmentFault: S230 the folder cannot be written.
    """
    folder = Path(name)
    base = folder.absolute().name if name else ""
    if not re.fullmatch(NAME_PATTERN, base) or len(base) > _LONGEST:
        shown = name or "NAME"
        suggestion = re.sub(r"[^A-Za-z0-9._-]+", "-", base).strip("-._")[:_LONGEST] or "demo"
        raise SpecError(
            f"{base!r} cannot name a run" if base else "an empty name",
            code="S154",
            where=shown,
            expected="letters, digits, `.`, `_` and `-`, a letter or digit first, 56 at most",
            next_step=f"serai init {suggestion}",
        )
    if folder.is_symlink() or folder.exists():
        empty = folder.is_dir() and not any(folder.iterdir())
        if not empty:
            raise SpecError(
                f"{folder} is not empty" if folder.is_dir() else f"{folder} is a file",
                code="S155",
                where=str(folder),
                expected="a name that is free, or an empty folder",
                next_step=f"serai init {_free_name(folder)}",
            )
    try:
        _write(folder, base)
    except OSError as error:
        raise EnvironmentFault(
            f"{folder} cannot be made: {error.strerror or error}",
            code="S230",
            where=str(error.filename or folder),
            expected="a folder that you may write to, on a disk with room",
            next_step="serai init A-PLACE-OF-YOURS/NAME",
        ) from error
    return Created(folder, {**_FILES, _SCHEMA: "the JSON Schema of job files, for editors"})


def _write(folder: Path, base: str) -> None:
    """Everything is written beside the folder and renamed, so that a half-made one never shows."""
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{base}-", dir=parent))
    try:
        templates = files("serai.spec") / "templates"
        for name in _FILES:
            text = (templates / name).read_text(encoding="utf-8")
            (aside / name).write_text(text.replace("NAME", base), encoding="utf-8")
        (aside / _SCHEMA).write_text(json.dumps(job_schema(), indent=2) + "\n", encoding="utf-8")
        umask = os.umask(0)
        os.umask(umask)
        aside.chmod(0o777 & ~umask)
        os.rename(aside, folder.absolute())
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _free_name(folder: Path) -> str:
    number = 2
    while folder.with_name(f"{folder.name}-{number}").exists():
        number += 1
    return str(folder.with_name(f"{folder.name}-{number}"))
