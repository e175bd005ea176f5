"""One launch of the workers, seen from the supervisor: started, watched, signalled, ended without remains."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serai.run.launcher_request import LaunchRequest
from serai.run.processes import kill_sessions, process_state

__all__ = ["LAUNCHER", "Attempt", "AttemptEnd"]

LAUNCHER = (sys.executable, "-m", "serai.run.launcher")
"""The launcher's command line; tests put one in its place that imports no torch."""

_SHIM = Path(__file__).with_name("worker_shim.py")


@dataclass
class AttemptEnd:
    """How an attempt ended.

    Attributes:
        exits: exit status of each rank, negative for a signal; ``None`` where it could not be learnt.
        deaths: ranks in the order in which they ended, with the moment (unix seconds).
        frozen: ranks that were stopped (state T) or stuck inside the kernel (D) when the group was killed.
        killed: ranks that were ended by the supervisor or by elastic (they are no cause of anything).
        launcher_error: what the launcher said before it failed, or that it vanished.
        survivors: processes that could not even be killed (stuck inside the kernel); normally none.
    """

    exits: dict[int, int | None] = field(default_factory=dict)
    deaths: list[tuple[int, float]] = field(default_factory=list)
    frozen: dict[int, str] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    launcher_error: str | None = None
    survivors: list[int] = field(default_factory=list)


class Attempt:
    """A launcher process and its workers.

    The launcher starts at construction (torch takes seconds to import, so it is started before it is needed);
    ``launch`` starts the workers; ``poll`` is called until it gives the end.
    """

    def __init__(self, log_dir: Path, *, launcher: Sequence[str] = LAUNCHER) -> None:
        self.log_dir = log_dir
        self.pids: dict[int, int] = {}
        self.end = AttemptEnd()
        self._buffer = b""
        self._closed = False
        log_dir.mkdir(parents=True, exist_ok=True)
        with open(log_dir / "launcher.log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SHIM), "-", str(os.getpid()), *launcher],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    @property
    def launcher_pid(self) -> int:
        return self._process.pid

    def launch(self, request: LaunchRequest) -> None:
        """Start the workers. Returns at once; ``pids`` fills when they run."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(request.to_line())
            stdin.flush()
        except BrokenPipeError:
            pass

    def poll(self, *, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for news; True when the attempt is over and nothing of it is left."""
        stdout = self._process.stdout
        assert stdout is not None
        deadline = time.monotonic() + timeout
        while not self._closed:
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            chunk = os.read(stdout.fileno(), 1 << 16)
            if not chunk:
                self._closed = True
                break
            self._buffer += chunk
            *lines, self._buffer = self._buffer.split(b"\n")
            for line in lines:
                self._take(line)
        if self._closed:
            self._finish()
        return self._closed

    def _take(self, line: bytes) -> None:
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:
            return
        match message.get("kind"):
            case "started":
                self.pids = {int(rank): int(pid) for rank, pid in message["pids"].items()}
            case "exit":
                rank, code = int(message["rank"]), int(message["code"])
                self.end.exits[rank] = code
                self.end.deaths.append((rank, float(message["time"])))
                if not message["first"] and code in (-signal.SIGTERM, -signal.SIGKILL):
                    self.end.killed.add(rank)
            case "failed":
                self.end.launcher_error = str(message["message"])

    @property
    def failing_for(self) -> float:
        """Seconds since a worker ended otherwise than well (0 or 75); 0 while none has."""
        times = [when for rank, when in self.end.deaths if self.end.exits.get(rank) not in (0, 75)]
        return max(0.0, time.time() - times[0]) if times else 0.0

    def signal_workers(self, number: signal.Signals) -> None:
        """Send a signal to each living worker itself (not to its children)."""
        for rank, pid in self.pids.items():
            if rank not in self.end.exits:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill_workers(self) -> None:
        """SIGKILL the whole session of every worker, children included."""
        for rank, pid in self.pids.items():
            state = process_state(pid)
            if rank not in self.end.exits and state not in ("Z", "X", ""):
                self.end.killed.add(rank)
                if state in ("T", "t", "D"):
                    self.end.frozen[rank] = state
        self.end.survivors = kill_sessions(self.pids.values())

    def abandon(self) -> None:
        """Kill launcher and workers now, whatever they do."""
        self.kill_workers()
        kill_sessions([self._process.pid])
        self._closed = True
        self._finish()

    def _finish(self) -> None:
        try:
            code: int | None = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = None
        self.end.survivors = kill_sessions([*self.pids.values(), self._process.pid])
        if code != 0 and self.end.launcher_error is None and not self.end.exits:
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            self.end.launcher_error = f"the launcher ended with {how} before its workers did"
        for rank in self.pids:
            self.end.exits.setdefault(rank, None)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
