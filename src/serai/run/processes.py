"""Processes by identity, sessions killed whole, and nothing left behind.

A pid alone proves nothing (numbers are reused), so a process is known by pid and start time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["ProcessIdentity", "kill_sessions", "leftovers", "process_state", "sweep"]

_AGENT_MODULE = "serai.checkpoint.agent"


@dataclass(frozen=True)
class ProcessIdentity:
    """A process and the moment it started (kernel ticks since boot where there is a /proc)."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        return cls(pid=pid, started=_start_time(pid))

    def alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        return (
            bool(self.started)
            and _start_time(self.pid) == self.started
            and process_state(self.pid) not in ("Z", "X", "")
        )


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat behind the command name, so field 3 (state) is at index 0."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text[text.rfind(")") + 2 :].split()


def _start_time(pid: int) -> str:
    fields = _stat_fields(pid)
    if fields:
        return fields[19]
    if Path("/proc/self/stat").exists():
        return ""
    try:
        return f"{psutil.Process(pid).create_time():.2f}"
    except psutil.Error:
        return ""


def process_state(pid: int) -> str:
    """The kernel's one-letter state: R running, S sleeping, D in the kernel, T stopped, Z zombie, '' gone."""
    fields = _stat_fields(pid)
    if fields:
        return fields[0]
    if Path("/proc/self/stat").exists():
        return ""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return ""
    return "Z" if status == psutil.STATUS_ZOMBIE else "S"


def _members(sessions: set[int]) -> list[int]:
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) in sessions and process_state(pid) not in ("Z", "X", ""):
                found.append(pid)
        except (ProcessLookupError, PermissionError):
            continue
    return found


def kill_sessions(sessions: Iterable[int], *, timeout: float = 10.0) -> list[int]:
    """SIGKILL every process of the given sessions until none is left.

    Repeats because a process may fork between the listing and the signal. Returns what is still alive at
    the deadline (only processes stuck inside the kernel can be), normally nothing.
    """
    wanted = {session for session in sessions if session > 1 and session != os.getsid(0)}
    deadline = time.monotonic() + timeout
    while members := _members(wanted):
        for pid in members:
            _kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return members
        time.sleep(0.02)
    return []


def leftovers(run_dir: Path) -> list[int]:
    """Live processes that were started for this run, found by their environment, whatever session they are in.

    The node's checkpoint agent is none of them: it outlives attempts on purpose.
    """
    mark = f"SERAI_RUN_DIR={run_dir}".encode()
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for pid in psutil.pids():
        if pid in mine:
            continue
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes()
            if mark not in variables.split(b"\0"):
                continue
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if _AGENT_MODULE not in command and process_state(pid) not in ("Z", "X", ""):
            found.append(pid)
    return found


def sweep(run_dir: Path, *, timeout: float = 10.0) -> int:
    """Kill what earlier attempts of this run left behind; returns how many processes that were."""
    deadline = time.monotonic() + timeout
    killed: set[int] = set()
    while (found := leftovers(run_dir)) and time.monotonic() < deadline:
        for pid in found:
            _kill(pid, signal.SIGKILL)
        killed.update(found)
        time.sleep(0.02)
    return len(killed)


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass
