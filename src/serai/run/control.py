"""``serai stop``: ask a live run to save and stop, or say that there is nobody to ask."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from dataclasses import dataclass
from enum import StrEnum

from serai.run.lock import LockHolder
from serai.run.processes import ProcessIdentity
from serai.run.workspace import Run, write_atomic

__all__ = ["StopAnswer", "StopResult", "stop"]


class StopAnswer(StrEnum):
    """What came of a stop request."""

    ASKED = "asked"
    STOPPED = "stopped"
    OTHER_HOST = "other_host"
    NOT_RUNNING = "not_running"
    SUPERVISOR_DEAD = "supervisor_dead"


@dataclass(frozen=True)
class StopResult:
    """``answer`` for programs, ``message`` for people, the supervisor's ``pid`` where there is one."""

    answer: StopAnswer
    message: str
    pid: int | None = None
    host: str | None = None


def stop(run: Run, *, wait: float | None = None, by: str = "serai stop") -> StopResult:
    """Ask a run's supervisor to save at the next step and stop with exit code 75.

    The request is a file in the run's folder, and a signal to the supervisor once it is proved to be that very
    process (pid and start time). A supervisor on another host finds the file within a second. When the
    supervisor is dead, the run is marked as interrupted; it resumes with ``serai run``.

    Args:
        wait: seconds to wait until the run has stopped; ``None`` returns once it was asked.
    """
    holder = run.holder()
    if holder is None:
        return _nobody(run)
    write_atomic(
        run.stop_path, json.dumps({"by": by, "time": time.time(), "host": socket.gethostname()}) + "\n"
    )
    answer, message = (
        StopAnswer.ASKED,
        f"asked {run.name} to save and stop (process {holder.pid} on {holder.host})",
    )
    if holder.host != socket.gethostname():
        answer = StopAnswer.OTHER_HOST
        message = f"asked {run.name} on {holder.host} (process {holder.pid}) to save and stop, through the workspace"
    elif holder.alive_here():
        _signal(holder)
    if wait is not None:
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            if run.holder() is None:
                return StopResult(StopAnswer.STOPPED, f"{run.name} has stopped", holder.pid, holder.host)
            time.sleep(0.1)
        message = f"{run.name} was asked to stop and is still saving after {wait:.0f} s"
    return StopResult(answer, message, holder.pid, holder.host)


def _signal(holder: LockHolder) -> None:
    if not ProcessIdentity(holder.pid, holder.identity).alive():
        return
    try:
        os.kill(holder.pid, signal.SIGTERM)
    except (ProcessLookupError, PermissionError):
        pass


def _nobody(run: Run) -> StopResult:
    state = run.state()
    if state["status"] != "interrupted":
        return StopResult(StopAnswer.NOT_RUNNING, f"{run.name} is not running ({state['status']})")
    with run.lock():
        run.update(status="interrupted", note="its supervisor died; marked by serai stop", ended=time.time())
    return StopResult(
        StopAnswer.SUPERVISOR_DEAD,
        f"the supervisor of {run.name} (process {state.get('pid')} on {state.get('host')}) is dead, and its processes "
        f"with it; the run is marked as interrupted: {state.get('command') or 'serai run job.yaml'} resumes it",
        state.get("pid"),
        state.get("host"),
    )
