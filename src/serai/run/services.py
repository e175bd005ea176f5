"""What the supervisor borrows from other rooms, in one place, imported only when it is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serai import errors
from serai.errors import CheckpointError, EnvironmentFault, SeraiError, StorageError
from serai.run.attempt import LAUNCHER
from serai.run.job import Job
from serai.run.processes import kill_sessions
from serai.run.workspace import Run

_SHIM = Path(__file__).with_name("worker_shim.py")

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
        prepare: makes a native job's data ready in the workspace's cache; returns the
            fields of the ``prepared`` event, and says what it is at.
        start_agent: starts the node's checkpoint agent for a checkpoint root, or finds it running.
        newest_checkpoint: newest durable checkpoint of a root, or ``None``.
    """

    launcher: Sequence[str]
    prepare: Callable[[Job, Run, Callable[[str], None]], dict[str, Any]]
    start_agent: Callable[[str], None]
    newest_checkpoint: Callable[[str], SavedStep | None]


def default_services() -> Services:
    return Services(
        launcher=LAUNCHER,
        prepare=_prepare,
        start_agent=_start_agent,
        newest_checkpoint=_newest_checkpoint,
    )


def _prepare(job: Job, run: Run, say: Callable[[str], None]) -> dict[str, Any]:
    """Prepare the data in a child process, and leave ``prepared.json`` in the run's folder for the workers.

    A child, because it holds the corpus in memory and spends long in native code that no signal interrupts; a
    stop request kills it, which is safe: the cache takes whole entries only.
    """
    command = [sys.executable, "-m", "serai.data.prepare", str(run.resolved_path), "--cache", str(run.cache)]
    command += ["--base", str(job.folder), "--out", str(run.path / "prepared.json")]
    shim = [sys.executable, "-I", "-S", str(_SHIM), "-", str(os.getpid())]
    with subprocess.Popen(
        [*shim, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            words: deque[str] = deque(maxlen=20)
            for line in process.stderr:
                words.append(line)
                if process.poll() is None and not line.startswith((" ", "[", "Traceback")):
                    say(line.rstrip())
            answer = process.stdout.read()
            code = process.wait()
        finally:
            kill_sessions([process.pid])
    try:
        document: dict[str, Any] = json.loads(answer)
    except ValueError:
        raise EnvironmentFault(
            f"data preparation ended with exit code {code}: {words[-1].strip() if words else 'no word'}",
            code="S524",
            where=" ".join(command),
            expected="prepared data, or an error that says what is wrong",
            next_step=f"{' '.join(command)}   (shows everything)",
        ) from None
    if code != 0:
        raise _error_of(document)
    return {key: value for key, value in document.items() if key not in ("schema_version", "seconds")}


def _error_of(document: dict[str, Any]) -> SeraiError:
    """The error that another serai process printed as JSON, of the same class."""
    told = document["error"]
    kind = getattr(errors, str(told.get("kind")), SeraiError)
    if not (isinstance(kind, type) and issubclass(kind, SeraiError)):
        kind = SeraiError
    found: SeraiError = kind(
        told["message"],
        code=told["code"],
        where=told["where"],
        expected=told["expected"],
        next_step=told["next"],
    )
    return found


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
