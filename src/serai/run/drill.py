"""``serai drill``: run a job untouched, run it again with processes killed, and compare every loss bit by bit.

Faults strike at observed steps, never after a sleep. Each run is supervised by a process of its own, as in real
life, because one of the faults is a signal to the supervisor. Real runs are not touched: a drill lives in
``<workspace>/drills/<name>-<id>/``, saves only there, and shares nothing but the cache of prepared data.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serai.errors import SpecError, TrainingError
from serai.events import EventWriter, read_events
from serai.run.console import Console
from serai.run.drill_report import DrillReport, Injected, compare
from serai.run.progress import Progress
from serai.run.same_state import same_state
from serai.run.workspace import Run, Workspace
from serai.spec.resolve import ResolvedSpec

__all__ = ["SUPERVISOR", "drill"]

SUPERVISOR = (sys.executable, "-m", "serai.run")
"""Command line of a supervisor, to which the run's folder is added; tests put a light one in its place."""

_POLL_S = 0.02
_FEWEST_STEPS = 12
_PATIENCE_S = 900.0
_SHIM = Path(__file__).with_name("worker_shim.py")


@dataclass(frozen=True)
class _Fault:
    """A fault, due once a step is reached (``None``: at the first step after the next resume).

    ``patience``: so many steps it waits for a first durable checkpoint, so that there is something to resume from.
    """

    name: str
    strike: Callable[[Run, subprocess.Popen[bytes]], list[int]]
    at_step: int | None
    patience: int = 0

    def due(self, step: int, *, durable: bool) -> bool:
        return self.at_step is None or step >= self.at_step + (0 if durable else self.patience)


def drill(
    spec: ResolvedSpec,
    workspace: Workspace,
    *,
    console: Console,
    supervisor: Sequence[str] = SUPERVISOR,
    same_weights: Callable[[Path, Path], bool | None] | None = None,
) -> DrillReport:
    """Rehearse failures of a job, and tell whether they change anything.

    Args:
        same_weights: compares the newest checkpoints of two roots; default: by the checkpoint engine.

    Raises:
        SpecError: too few steps to strike between (S531).
        TrainingError: the job fails without any fault (S530), or does not come back after one (S532).
    """
    began = time.monotonic()
    inner = _drill_workspace(workspace, spec.name)
    console.line(f"drill in {inner.path}")
    untouched = inner.create("untouched", spec_text=spec.text, resolved=_document(spec, "untouched"))
    untouched.update(job_file=spec.path, job_folder=str(spec.folder))
    code = _Supervised(untouched, console, supervisor, label="untouched").finish()
    if code != 0:
        raise _job_failed(untouched, code)
    reference_s = time.monotonic() - began
    steps = _last_step(untouched)
    struck = inner.create("struck", spec_text=spec.text, resolved=_document(spec, "struck"))
    struck.update(job_file=spec.path, job_folder=str(spec.folder))
    plan = _plan(steps, processes=spec.document.resources.processes, every=_save_every(spec))
    injected = _strike(struck, plan, console, supervisor)
    report = compare(
        untouched,
        struck,
        injected,
        same_weights=(same_weights or same_state)(untouched.checkpoints, struck.checkpoints),
        reference_s=reference_s,
        seconds=time.monotonic() - began,
    )
    if report.identical:
        for run in (untouched, struck):
            shutil.rmtree(run.checkpoints, ignore_errors=True)
    return report


def _drill_workspace(workspace: Workspace, name: str) -> Workspace:
    """A fresh workspace inside the real one; its cache is the real one's."""
    workspace.preflight()
    inner = Workspace(workspace.path / "drills" / f"{name}-{secrets.token_hex(3)}")
    inner.path.mkdir(parents=True)
    workspace.cache.mkdir(exist_ok=True)
    inner.cache.symlink_to(workspace.cache, target_is_directory=True)
    return inner


def _document(spec: ResolvedSpec, name: str) -> dict[str, Any]:
    """The job as it is, but saving inside the drill, recording every step, and relaunching as often as needed."""
    document = spec.to_json()
    document["name"] = name
    document["checkpoint"] = {**document["checkpoint"], "root": None}
    if "local" in document["checkpoint"]:
        document["checkpoint"]["local"] = None
    if "train" in document:
        document["train"] = {**document["train"], "log_every": 1}
    document["retry"] = {**document["retry"], "max": 20, "backoff_s": 0.0}
    return document


def _save_every(spec: ResolvedSpec) -> int | None:
    """Steps between two saves, where the job says so."""
    every = spec.document.checkpoint.every
    return every if spec.document.script is None and isinstance(every, int) else None


def _plan(steps: int, *, processes: int, every: int | None) -> list[_Fault]:
    """Four faults over the run; the second strikes right after the first resume, before another save."""
    if steps < _FEWEST_STEPS:
        raise SpecError(
            f"the job records {steps} steps; a drill strikes at four places between them",
            code="S531",
            where="train.steps",
            expected=f"at least {_FEWEST_STEPS} recorded steps (a script records them with serai.events)",
            next_step="serai drill job.yaml --set train.steps=60",
        )

    def between_saves(share: float) -> int:
        """A step near that share of the run, half-way between two saves."""
        if every is None or every >= steps // 2:
            return round(share * steps)
        return max(1, round(share * steps / every)) * every + every // 2

    return [
        _Fault(
            f"kill -9 of rank {processes - 1}",
            _kill_rank(processes - 1),
            between_saves(0.25),
            patience=steps // 8,
        ),
        _Fault("kill -9 of rank 0, right after the resume", _kill_rank(0), None),
        _Fault("kill -9 of all processes", _kill_all, between_saves(0.5)),
        _Fault("SIGTERM to the supervisor (preemption)", _terminate, min(between_saves(0.75), steps - 3)),
    ]


def _kill_rank(rank: int) -> Callable[[Run, subprocess.Popen[bytes]], list[int]]:
    def strike(run: Run, supervisor: subprocess.Popen[bytes]) -> list[int]:
        pid = _pids(run)[rank]
        os.kill(pid, signal.SIGKILL)
        return [pid]

    return strike


def _kill_all(run: Run, supervisor: subprocess.Popen[bytes]) -> list[int]:
    pids = _pids(run)
    for pid in pids:
        os.killpg(pid, signal.SIGKILL)
    return pids


def _terminate(run: Run, supervisor: subprocess.Popen[bytes]) -> list[int]:
    supervisor.send_signal(signal.SIGTERM)
    return [supervisor.pid]


def _pids(run: Run) -> list[int]:
    """Processes of the newest attempt, by rank."""
    *_, newest = run.events("attempt_started")
    return [int(pid) for pid in newest["pids"]]


class _Supervised:
    """A run under a supervisor of its own, followed through its events."""

    def __init__(self, run: Run, console: Console, command: Sequence[str], *, label: str) -> None:
        self.run = run
        self._console = console
        self._command = command
        self._label = label
        self._shown = time.monotonic()
        self._began = time.monotonic()
        steps = (run.resolved().get("train") or {}).get("steps")
        self.progress = Progress(run, total_steps=steps)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self.run.path / "supervisor.log", "ab") as log:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(_SHIM),
                    "-",
                    str(os.getpid()),
                    *self._command,
                    str(self.run.path),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def restart(self) -> None:
        self.process = self._start()

    def follow(self) -> Iterator[dict[str, Any]]:
        """Events of all ranks as they come, until the supervisor ends."""
        quiet_since = time.monotonic()
        with self._ended_by_an_interrupt():
            while True:
                alive = self.process.poll() is None
                news = self.progress.poll()
                yield from news
                now = time.monotonic()
                if news:
                    quiet_since = now
                if now - self._shown >= self._console.live_interval:
                    self._shown = now
                    self._console.live(f"{self._label}: {self.progress.line(elapsed=now - self._began)}")
                if not alive:
                    return
                if now - quiet_since > _PATIENCE_S:
                    self.process.terminate()
                    raise _not_back(self.run, f"no event for {_PATIENCE_S:.0f} s")
                time.sleep(_POLL_S)

    @contextmanager
    def _ended_by_an_interrupt(self) -> Iterator[None]:
        """Whatever ends the drill early ends the supervisor, and with it its workers."""
        try:
            yield
        finally:
            if self.process.poll() is None:
                self.process.terminate()
                try:
                    self.process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()

    def finish(self) -> int:
        for _ in self.follow():
            pass
        return self.process.wait()


def _strike(run: Run, faults: list[_Fault], console: Console, supervisor: Sequence[str]) -> list[Injected]:
    """Run a job to its end while the faults strike, restarting the supervisor when it was stopped."""
    injected: list[Injected] = []
    waiting = list(faults)
    with EventWriter(run.path / "events" / "drill.jsonl") as events:
        watched = _Supervised(run, console, supervisor, label="with faults")
        struck_attempt = 0
        while True:
            for event in watched.follow():
                if event["kind"] != "step" or event["rank"] != 0 or not waiting:
                    continue
                fault, step, attempt = waiting[0], int(event["step"]), int(event.get("attempt") or 0)
                durable = watched.progress.durable is not None
                if attempt <= struck_attempt or not fault.due(step, durable=durable):
                    continue
                when = time.time()
                try:
                    pids = fault.strike(run, watched.process)
                except (ProcessLookupError, ValueError):
                    continue  # it ended this very moment by itself; the next step will do
                waiting.pop(0)
                struck_attempt = attempt
                injected.append(Injected(fault.name, at_step=step, attempt=attempt, time=when))
                events.write("fault_injected", fault=fault.name, step=step, attempt=attempt, pids=pids)
                console.line(f"step {step}: {fault.name}")
                watched.progress.begin_attempt()
            code = watched.process.wait()
            if code == 75:
                watched.restart()
                continue
            if code != 0:
                raise _not_back(run, f"exit code {code}")
            if waiting:
                raise _not_back(run, f"it ended before the fault {waiting[0].name!r} was due")
            return injected


def _last_step(run: Run) -> int:
    return max((int(event["step"]) for event in run.steps()), default=0)


def _job_failed(run: Run, code: int) -> TrainingError:
    failure = run.state().get("failure") or {}
    message = failure.get("message") or run.state().get("note") or f"exit code {code}"
    return TrainingError(
        f"the job fails without any fault: {message}",
        code="S530",
        where=failure.get("log") or str(run.path / "supervisor.log"),
        expected="a job that runs to its end, to compare the struck one with",
        next_step="serai run job.yaml   (fix it first)",
    )


def _not_back(run: Run, why: str) -> TrainingError:
    failure = run.state().get("failure") or {}
    return TrainingError(
        f"the job did not come back after a fault: {failure.get('message') or why}",
        code="S532",
        where=failure.get("log") or str(run.path / "supervisor.log"),
        expected="a relaunch that resumes and goes on",
        next_step=f"look at {run.path / 'supervisor.log'} and {run.path / 'logs'}",
    )


def read_injected(run: Run) -> list[dict[str, Any]]:
    """What a drill did to a run, for reports."""
    return list(read_events(run.path / "events" / "drill.jsonl"))
