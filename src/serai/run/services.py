"""What the supervisor borrows from other rooms, in one place, imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from serai.errors import CheckpointError, StorageError
from serai.run.attempt import LAUNCHER
from serai.run.job import Job
from serai.run.workspace import Run

__all__ = ["SavedStep", "Services", "default_services"]


@dataclass(frozen=True)
class SavedStep:
    """A durable checkpoint as the catalog tells of it; ``created`` in unix seconds, ``loss`` if it was saved with it."""

    step: int
    created: float
    loss: float | None = None
    bytes: int = 0
    name: str = ""


@dataclass(frozen=True)
class Services:
    """The supervisor's helpers; tests put light ones in their place.

    Attributes:
        launcher: command line of the launcher process.
        prepare: makes a native job's data ready in the workspace's cache; returns the fields of the ``prepared`` event.
        start_agent: starts the node's checkpoint agent for a checkpoint root, or finds it running.
        newest_checkpoint: newest durable checkpoint of a root, or ``None``.
    """

    launcher: Sequence[str]
    prepare: Callable[[Job, Run], dict[str, Any]]
    start_agent: Callable[[str], None]
    newest_checkpoint: Callable[[str], SavedStep | None]


def default_services() -> Services:
    return Services(
        launcher=LAUNCHER,
        prepare=_prepare,
        start_agent=_start_agent,
        newest_checkpoint=_newest_checkpoint,
    )


def _prepare(job: Job, run: Run) -> dict[str, Any]:
    """Prepare the data, and leave ``prepared.json`` in the run's folder for the workers."""
    from serai.data.prepare import prepare

    assert job.data is not None
    prepared = prepare(job.data, cache=run.cache, seed=job.seed, base=job.folder)
    prepared.save(run.path / "prepared.json")
    fields = prepared.to_json()
    return {key: value for key, value in fields.items() if key not in ("schema_version", "seconds")}


def _start_agent(root: str) -> None:
    from serai.checkpoint.agent.client import ensure_agent

    ensure_agent(root)


def _newest_checkpoint(root: str) -> SavedStep | None:
    """What the catalog says; a storage that does not answer now is no reason to disturb training."""
    from serai.checkpoint.catalog import generations

    try:
        found = generations(root)
    except (StorageError, CheckpointError):
        return None
    if not found:
        return None
    newest = found[0]
    return SavedStep(
        newest.step, newest.created, loss=newest.metrics.get("loss"), bytes=newest.bytes, name=newest.name
    )
