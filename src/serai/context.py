"""The one place where serai reads its own environment variables.

A supervisor tells the processes it starts which run they belong to; a bare script has no context and
everything works without one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RunContext", "current_run"]

_RUN_DIR = "SERAI_RUN_DIR"
_ATTEMPT = "SERAI_ATTEMPT"
_CHECKPOINTS = "SERAI_CHECKPOINTS"


@dataclass(frozen=True)
class RunContext:
    """The run a process belongs to.

    Attributes:
        run_dir: the run's folder in the workspace (spec, events, logs).
        attempt: launch attempt, counted from 1.
        checkpoints: root URL or folder of the run's checkpoints.
    """

    run_dir: Path
    attempt: int
    checkpoints: str

    def environment(self) -> dict[str, str]:
        """The variables that hand this context to a child process."""
        return {
            _RUN_DIR: str(self.run_dir),
            _ATTEMPT: str(self.attempt),
            _CHECKPOINTS: self.checkpoints,
        }


def current_run(environ: Mapping[str, str] | None = None) -> RunContext | None:
    """The run this process belongs to, or ``None`` outside of one."""
    variables = os.environ if environ is None else environ
    run_dir = variables.get(_RUN_DIR)
    if not run_dir:
        return None
    return RunContext(
        run_dir=Path(run_dir),
        attempt=int(variables.get(_ATTEMPT, "1")),
        checkpoints=variables.get(_CHECKPOINTS) or str(Path(run_dir) / "checkpoints"),
    )
