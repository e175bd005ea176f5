"""Runs the program as a person does: in a process of its own, with its own folder, stdout and stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "serai"]

_KEPT = ("PATH", "PYTHONPATH", "HOME", "TMPDIR", "LANG", "VIRTUAL_ENV", "PIP_INDEX_URL", "PIP_CONFIG_FILE")


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """stdout as exactly one JSON object, with nothing on stderr."""
        assert self.err == ""
        lines = self.out.splitlines()
        assert len(lines) == 1, self.out
        document = json.loads(lines[0])
        assert document["schema_version"] == 1
        return dict(document)

    @property
    def json_lines(self) -> list[dict[str, Any]]:
        """stdout as JSON lines, with nothing on stderr."""
        assert self.err == ""
        documents = [json.loads(line) for line in self.out.splitlines()]
        assert all(document["schema_version"] == 1 for document in documents)
        return documents


def serai(*arguments: str, cwd: Path, timeout: float = 60, **variables: str) -> Outcome:
    """Runs ``serai`` with a small, known environment."""
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment.update(OMP_NUM_THREADS="1", PYTHONWARNINGS="error::DeprecationWarning:serai", **variables)
    done = subprocess.run(
        [sys.executable, "-m", "serai", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
