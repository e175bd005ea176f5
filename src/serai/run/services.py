"""What the supervisor borrows from other rooms, in one place, imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from serai.run.attempt import LAUNCHER
from serai.run.job import Job
from serai.run.workspace import Run

__all__ = ["Services", "default_services"]


@dataclass(frozen=True)
class Services:
    """The supervisor's helpers; tests put light ones in their place.

    Attributes:
        launcher: command line of the launcher process.
        prepare: makes a native job's data ready in the workspace's cache; returns the fields of the ``prepared`` event.
        start_agent: starts the node's checkpoint agent for a checkpoint root, or finds it running.
        newest_checkpoint: newest durable checkpoint of a root as (step, unix seconds), or ``None``.
    """

    launcher: Sequence[str]
    prepare: Callable[[Job, Run], dict[str, Any]]
    start_agent: Callable[[str], None]
    newest_checkpoint: Callable[[str], tuple[int, float] | None]


def default_services() -> Services:
    return Services(
        launcher=LAUNCHER,
        prepare=_prepare,
        start_agent=lambda root: None,
        newest_checkpoint=lambda root: None,
    )


def _prepare(job: Job, run: Run) -> dict[str, Any]:
    """Prepare the data, and leave ``prepared.json`` in the run's folder for the workers."""
    from serai.data.prepare import prepare

    assert job.data is not None
    prepared = prepare(job.data, cache=run.cache, seed=job.seed, base=job.folder)
    prepared.save(run.path / "prepared.json")
    fields = prepared.to_json()
    return {key: value for key, value in fields.items() if key not in ("schema_version", "seconds")}
