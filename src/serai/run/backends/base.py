"""What a back end is: a place that can start a run's supervisor, tell how it is doing, and stop it.

Whatever the place, what it starts on each node is ``python -m serai.run RUN_DIR``: the supervisor is the same
everywhere, and so are its events, exit codes and relaunches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from serai.run.job import Job
from serai.run.workspace import Run

__all__ = ["Backend", "BackendStatus", "Submission"]


@dataclass(frozen=True)
class Submission:
    """A request that was accepted; ``handle`` is the place's own name for it (a pid, a job id)."""

    backend: str
    handle: str


@dataclass(frozen=True)
class BackendStatus:
    """How a run is doing: the place's word on whether it lives, and the run's own status."""

    alive: bool
    status: str
    exit_code: int | None


class Backend(ABC):
    """Four methods; a new place is one new file with a class of these."""

    name: str

    @abstractmethod
    def render(self, job: Job, run_dir: Path, *, attempt: int = 1) -> str:
        """The exact request that ``submit`` would make for a run in that folder, as text; has no effect, and the
        folder need not be there."""

    @abstractmethod
    def submit(self, run: Run) -> Submission:
        """Start the run's supervisor and return at once.

        Raises:
            EnvironmentFault: the run is live already, or the place refuses.
        """

    @abstractmethod
    def status(self, run: Run) -> BackendStatus:
        """How the run is doing."""

    @abstractmethod
    def cancel(self, run: Run) -> str:
        """Ask the run to save and stop; says in a sentence what came of it."""
