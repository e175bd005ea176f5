"""The supervisor: prepare, launch, watch, relaunch by cause, stop on request, report.

A light process (it never imports torch) that owns one run. Everything it learns goes into the run's folder, so
it can be killed at any moment: the workers die with it (the kernel sees to that), the checkpoint agent flushes
what is sealed, and the next ``serai run`` of that name goes on.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
import uuid
from dataclasses import dataclass
from typing import Any

from serai.errors import EnvironmentFault
from serai.events import EventWriter
from serai.run import report
from serai.run.adopt import adopt
from serai.run.attempt import Attempt
from serai.run.causes import Failure, classify
from serai.run.console import Console
from serai.run.job import Job, launch_request
from serai.run.launcher_request import LaunchRequest
from serai.run.memory_kills import MemoryKills
from serai.run.policy import RetryPolicy
from serai.run.processes import sweep
from serai.run.progress import Progress
from serai.run.services import Services, default_services
from serai.run.stopping import StopRequested, StopRequests
from serai.run.workspace import Run, Workspace
from serai.spec.resolve import ResolvedSpec
from serai.units import format_duration

__all__ = ["run", "supervise"]

_POLL_S = 0.1
_SHUTDOWN_S = 10
_FULL_BYTES = 1 << 20
_CATALOG_EVERY_S = 5.0
DONE, FAILED, STOPPED, INTERRUPTED = 0, 1, 75, 130


@dataclass(frozen=True)
class _Outcome:
    """How one attempt ended: ``finished``, ``stopped`` or ``failed`` with its cause."""

    status: str
    exit_code: int
    failure: Failure | None = None
    note: str = ""


def run(
    spec: ResolvedSpec, workspace: Workspace, *, console: Console, services: Services | None = None
) -> int:
    """Run a job in a workspace, or go on with the run of that name, and return the exit code.

    Idempotent: a run of that name that is finished says so and is left alone (unless ``train.steps`` grew),
    one that was stopped, interrupted or has failed resumes.

    Raises:
        SpecError: the run of that name was started with another spec (S127).
        SeraiError: as ``supervise``, and what stands in the way of a run folder (S501 to S508).
    """
    found = workspace.create(spec.name, spec_text=spec.text, resolved=spec.to_json())
    with found.lock() as lock:
        if lock.note:
            console.line(f"note: {lock.note}")
        if not adopt(found, spec, console=console):
            return DONE
        with StopRequests(found.stop_path) as stops:
            return _Supervisor(found, console, services or default_services(), stops).run()


def supervise(run: Run, *, console: Console, services: Services | None = None) -> int:
    """Run a run's job to its end and return the exit code: 0 done, 1 failed, 75 stopped, 130 stopped twice.

    Raises:
        SeraiError: what stands in the way before the first launch (S502 already running, S515 port in use,
            S522 no script, and whatever preparation raises). The run is then marked as failed.
    """
    with run.lock() as lock, StopRequests(run.stop_path) as stops:
        if lock.note:
            console.line(f"note: {lock.note}")
        return _Supervisor(run, console, services or default_services(), stops).run()


class _Supervisor:
    def __init__(self, run: Run, console: Console, services: Services, stops: StopRequests) -> None:
        state = run.state()
        self._run = run
        self._console = console
        self._services = services
        self._stops = stops
        self._job = Job.from_document(run.resolved(), folder=run.job_folder(state))
        self._root = self._job.checkpoint_root(run.path)
        self._host = socket.gethostname()
        self._began = time.time()
        self._number = self._launched = int(state.get("attempts", 0))
        self._events = EventWriter(run.supervisor_events)
        self._progress = Progress(run, total_steps=self._job.steps, script=self._job.script is not None)
        self._policy = RetryPolicy(self._job.retry)
        self._announced_stop = False
        self._said: set[str] = set()
        self._last_live = time.monotonic()
        self._last_catalog = 0.0
        self._learn_newest_checkpoint()

    def run(self) -> int:
        """The whole life of this supervisor."""
        resumed = self._number > 0
        self._update(
            status="preparing",
            pid=os.getpid(),
            host=self._host,
            exit_code=None,
            started=self._began,
            failure=None,
        )
        self._write(
            "run_started",
            pid=os.getpid(),
            host=self._host,
            run=self._run.id,
            resumed=resumed,
            processes=self._processes,
        )
        if remains := sweep(self._run.path):
            self._console.line(f"killed {remains} process(es) that an earlier attempt left behind")
        attempt: Attempt | None = None
        try:
            self._job.check_script()
            self._check_port()
            attempt = self._new_attempt()
            self._prepare()
            self._services.start_agent(self._root)
            outcome = self._attempts(attempt)
        except StopRequested:
            outcome = self._stopped_while_preparing(attempt)
        except BaseException as error:
            if attempt is not None:
                attempt.abandon()
            self._end(_Outcome("failed", getattr(error, "exit_code", FAILED), note=str(error)), say=False)
            raise
        return self._end(outcome)

    @property
    def _processes(self) -> int:
        return self._job.resources.processes

    def _write(self, kind: str, **fields: Any) -> None:
        """An event of the supervisor's own; a full disk must not end the supervisor before it has said so."""
        try:
            self._events.write(kind, **fields)
        except OSError as error:
            self._say_once(f"{self._run.supervisor_events} cannot be written: {error.strerror}")

    def _update(self, **fields: Any) -> None:
        try:
            self._run.update(**fields)
        except OSError as error:
            self._say_once(f"{self._run.path / 'run.json'} cannot be written: {error.strerror}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._console.line(text)

    def _new_attempt(self) -> Attempt:
        self._number += 1
        return Attempt(self._run.log_dir(self._number), launcher=self._services.launcher)

    def _check_port(self) -> None:
        port = self._job.resources.master_port
        if port is None:
            return
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise EnvironmentFault(
                    f"port {port} is in use on {self._host} ({error.strerror})",
                    code="S515",
                    where="resources.master_port",
                    expected="a port that no process listens on",
                    next_step="remove resources.master_port (a free port is then chosen), or name another",
                ) from None

    def _prepare(self) -> None:
        if self._job.data is None:
            return
        self._console.line("preparing data (cached by content) ...")
        began = time.monotonic()
        with self._stops.interruptible():
            fields = self._services.prepare(self._job, self._run, self._console.line)
        seconds = time.monotonic() - began
        self._write("prepared", seconds=seconds, **fields)
        words = ", ".join(_prepared_words(fields))
        self._console.line(f"data ready in {format_duration(seconds)}{': ' + words if words else ''}")

    def _attempts(self, attempt: Attempt) -> _Outcome:
        """Launch until the job is finished, stopped, or failed for good."""
        while True:
            outcome = self._one_attempt(attempt)
            self._note_end(outcome)
            if outcome.failure is None:
                return outcome
            durable = self._progress.durable
            decision = self._policy.after(
                outcome.failure, step=self._progress.attempt_step, durable=durable[0] if durable else None
            )
            if not decision.relaunch:
                return _Outcome("failed", FAILED, outcome.failure, decision.reason)
            attempt = self._new_attempt()
            self._write(
                "relaunch",
                attempt=self._number,
                cause=outcome.failure.cause,
                resume_step=durable[0] if durable else None,
                delay=decision.delay,
            )
            place = f"from step {durable[0]} or newer" if durable else "from the start"
            self._console.line(
                f"{outcome.failure.rule.words}: {outcome.failure.message}; relaunching {place} "
                f"(relaunch {self._policy.relaunches} of {self._job.retry.max})"
            )
            if self._wait(decision.delay):
                attempt.abandon()
                return _Outcome("stopped", STOPPED, note="stopped between two attempts; nothing new to save")

    def _wait(self, seconds: float) -> bool:
        """Wait before a relaunch; True when a stop was requested meanwhile."""
        deadline = time.monotonic() + seconds
        while not self._stops.look() and time.monotonic() < deadline:
            time.sleep(min(_POLL_S, seconds))
        return self._stops.count > 0

    def _one_attempt(self, attempt: Attempt) -> _Outcome:
        memory_kills = MemoryKills()
        self._progress.poll()
        self._progress.begin_attempt()
        attempt.launch(self._request())
        self._launched = self._number
        self._update(status="running", attempts=self._number)
        hang_s = self._watch(attempt, memory_kills)
        sweep(self._run.path)
        self._progress.poll()
        ended = dict(attempt.end.deaths)
        for rank, code in sorted(attempt.end.exits.items()):
            self._write(
                "worker_exited",
                attempt=self._number,
                rank=rank,
                exit_code=code,
                signal=-code if code is not None and code < 0 else None,
                ended=ended.get(rank),
                killed_by_supervisor=rank in attempt.end.killed,
            )
        return self._judge(
            attempt, hang_s=hang_s, oom_killed=any(memory_kills.near(moment) for moment in ended.values())
        )

    def _request(self) -> LaunchRequest:
        run_id = f"{self._run.id}-{self._number}-{uuid.uuid4().hex[:8]}"
        return launch_request(
            self._job, self._run.path, attempt=self._number, run_id=run_id, shutdown_timeout_s=_SHUTDOWN_S
        )

    def _watch(self, attempt: Attempt, memory_kills: MemoryKills) -> float | None:
        """Until nothing of the attempt is left. Returns the seconds of silence if it had to be killed for a hang."""
        announced = False
        stop_sent: float | None = None
        hang: float | None = None
        while not attempt.poll(timeout=_POLL_S):
            if attempt.pids and not announced:
                announced = True
                self._write(
                    "attempt_started",
                    attempt=self._number,
                    processes=self._processes,
                    pids=[attempt.pids[rank] for rank in sorted(attempt.pids)],
                    launcher_pid=attempt.launcher_pid,
                )
            self._tell(self._progress.poll())
            self._show()
            memory_kills.look()
            requests = self._stops.look()
            if requests:
                self._announce_stop()
            if requests > 1:
                attempt.abandon()
                break
            if requests and stop_sent is None and announced:
                attempt.signal_workers(signal.SIGTERM)
                stop_sent = time.monotonic()
            if stop_sent is not None and time.monotonic() - stop_sent > self._job.retry.stop_grace_s:
                self._console.line(
                    f"not stopped after {self._job.retry.stop_grace_s:.0f} s of grace: killing"
                )
                attempt.kill_workers()
                stop_sent = time.monotonic()
            if attempt.failing_for > _SHUTDOWN_S:
                attempt.kill_workers()
            limit = self._job.retry.hang_timeout_s
            if limit is not None and hang is None and self._progress.silence > limit and self._may_hang():
                hang = self._progress.silence
                self._console.line(f"no sign of life for {hang:.0f} s: killing the processes")
                attempt.kill_workers()
        return hang

    def _tell(self, news: list[dict[str, Any]]) -> None:
        """What a person should hear of at once, though training goes on."""
        for event in news:
            if event["kind"] == "save_failed":
                self._console.line(f"the save of step {event['step']} failed: {event['message']}")
            elif event["kind"] == "restored" and event["rank"] == 0:
                self._console.line(
                    f"resumed from step {event['step']} ({event['tier']}, {event['seconds']:.2f} s)"
                )

    def _may_hang(self) -> bool:
        """A script that never wrote an event cannot be judged by its events."""
        return self._job.script is None or self._progress.attempt_step is not None

    def _announce_stop(self) -> None:
        if self._announced_stop:
            return
        self._announced_stop = True
        self._write("stop_requested", by=self._stops.by)
        self._update(status="stopping")
        self._console.line(
            f"{self._stops.by}: saving at the next step, then stopping with exit code 75 (once more: stop now)"
        )

    def _judge(self, attempt: Attempt, *, hang_s: float | None, oom_killed: bool) -> _Outcome:
        exits = attempt.end.exits
        # A rank that lingers after its peers have saved and left is ended by elastic: not its own doing.
        own = [code for rank, code in exits.items() if rank not in attempt.end.killed]
        if own == [0] * self._processes:
            return _Outcome("finished", DONE)
        if self._stops.count > 1:
            return _Outcome(
                "stopped", INTERRUPTED, note="stopped at once; nothing was saved since the last checkpoint"
            )
        if 75 in own and all(code in (0, 75) for code in own):
            by = "" if self._stops.count else "a worker was told to stop by a signal from outside"
            return _Outcome("stopped", STOPPED, note=by)
        failure = classify(
            attempt.end,
            errors=self._progress.errors,
            log_dir=attempt.log_dir,
            hang_s=hang_s,
            oom_killed=oom_killed,
            fixed_port=self._job.resources.master_port is not None,
            disk_full=shutil.disk_usage(self._run.path).free < _FULL_BYTES,
        )
        if self._stops.count and failure.rule.retry:
            lost = self._progress.attempt_step is not None
            note = "stopped before the last steps were saved" if lost else "stopped before the first step"
            return _Outcome("stopped", STOPPED, note=note)
        return _Outcome("failed", FAILED, failure)

    def _note_end(self, outcome: _Outcome) -> None:
        failure = outcome.failure
        fields: dict[str, Any] = {"cause": None, "first_failing_rank": None}
        if failure is not None:
            fields = {
                "cause": failure.cause,
                "first_failing_rank": failure.rank,
                "message": failure.message,
                "traceback": failure.traceback,
                "log": str(failure.log) if failure.log else None,
            }
        self._write(
            "attempt_ended",
            attempt=self._number,
            status=outcome.status,
            host=self._host,
            last_step=self._progress.attempt_step,
            durable_step=self._progress.durable[0] if self._progress.durable else None,
            **fields,
        )

    def _stopped_while_preparing(self, attempt: Attempt | None) -> _Outcome:
        if attempt is not None:
            attempt.abandon()
        self._announce_stop()
        code = INTERRUPTED if self._stops.count > 1 else STOPPED
        return _Outcome("stopped", code, note="stopped while preparing; no step was run")

    def _show(self) -> None:
        now = time.monotonic()
        self._learn_newest_checkpoint()
        if now - self._last_live >= self._console.live_interval:
            self._last_live = now
            prefix = "stopping · " if self._announced_stop else ""
            self._console.live(prefix + self._progress.line(elapsed=time.time() - self._began))

    def _learn_newest_checkpoint(self) -> None:
        """From the catalog, for scripts that write no events and for what an earlier supervisor saved."""
        now = time.monotonic()
        if self._last_catalog and (self._job.script is None or now - self._last_catalog < _CATALOG_EVERY_S):
            return
        self._last_catalog = now
        found = self._services.newest_checkpoint(self._root)
        if found is None or not self._progress.saw_durable(found.step, found.created, loss=found.loss):
            return
        if self._job.script is not None:
            self._write(
                "durable",
                step=found.step,
                generation=found.name,
                loss=found.loss,
                bytes=found.bytes,
                saved=found.created,
            )

    def _end(self, outcome: _Outcome, *, say: bool = True) -> int:
        seconds = time.time() - self._began
        failure = outcome.failure
        self._last_catalog = 0.0
        self._learn_newest_checkpoint()
        self._write(
            "run_ended",
            status=outcome.status,
            exit_code=outcome.exit_code,
            seconds=seconds,
            note=outcome.note,
        )
        ending = {
            "status": outcome.status,
            "exit_code": outcome.exit_code,
            "attempts": self._launched,
            "ended": time.time(),
            "note": outcome.note,
            "durable_step": self._progress.durable[0] if self._progress.durable else None,
            "failure": report.failure_document(failure, host=self._host, attempt=self._number)
            if failure
            else None,
        }
        self._update(**ending)
        self._events.close()
        self._report(ending, say=say)
        return outcome.exit_code

    def _report(self, ending: dict[str, Any], *, say: bool) -> None:
        """Whatever goes wrong here is said, and changes nothing about how the run ended."""
        try:
            document = report.collect(self._run, ending=ending)
            for line in report.summary(document) if say else ():
                self._console.line(line)
            report.save(self._run, document)
        except Exception as error:
            self._console.line(f"the report could not be written: {type(error).__name__}: {error}")


def _prepared_words(fields: dict[str, Any]) -> list[str]:
    words = []
    if "train_tokens" in fields:
        words.append(f"{int(fields['train_tokens']):,} training tokens")
    if "vocab_size" in fields:
        words.append(f"a vocabulary of {int(fields['vocab_size']):,}")
    if "unigram_entropy" in fields:
        words.append(f"unigram entropy {float(fields['unigram_entropy']):.3f} nats a token")
    return words
