"""Why an attempt ended, and what that calls for.

The first failing rank is seldom the first to die in a log: when one process is killed, its peers raise
"connection reset" within milliseconds. So causes are weighed: a signal from outside and an error of the
script itself explain the communication errors of the others, never the other way round.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from serai.run.attempt import AttemptEnd

__all__ = ["Cause", "Failure", "Rule", "classify", "rule_of"]


class Cause(StrEnum):
    """Cause classes, as they stand in events and reports."""

    USER_ERROR = "user_error"
    SPEC_ERROR = "spec_error"
    NOT_A_NUMBER = "not_a_number"
    OUT_OF_MEMORY = "out_of_memory"
    OUT_OF_MEMORY_KILL = "out_of_memory_kill"
    DISK_FULL = "disk_full"
    PORT_IN_USE = "port_in_use"
    KILLED = "killed"
    CRASH = "crash"
    COLLECTIVE = "collective"
    HANG = "hang"
    CHECKPOINT = "checkpoint"
    LAUNCHER = "launcher"


@dataclass(frozen=True)
class Rule:
    """What a cause calls for.

    Attributes:
        code: the error code that ``serai explain`` knows.
        words: the cause in a few words.
        retry: whether a relaunch can help.
        patience: failures in a row at the same step, without progress, after which relaunching stops.
        advice: what a person should look at or do.
        weight: a heavier cause explains a lighter one of another rank.
    """

    code: str
    words: str
    retry: bool
    patience: int
    advice: str
    weight: int


_RULES: dict[Cause, Rule] = {
    Cause.SPEC_ERROR: Rule("S511", "the job or its arguments are wrong", False, 1, "fix the job file", 9),
    Cause.NOT_A_NUMBER: Rule(
        "S512",
        "the loss is not a number",
        False,
        1,
        "lower train.learning_rate or add warm-up; a relaunch would meet the same numbers again",
        8,
    ),
    Cause.OUT_OF_MEMORY: Rule(
        "S513", "a process ran out of memory", False, 1, "lower train.micro_batch or data.seq_len", 8
    ),
    Cause.DISK_FULL: Rule("S514", "the disk is full", False, 1, "free some space, then run the job again", 8),
    Cause.PORT_IN_USE: Rule(
        "S515", "the master port is in use", True, 3, "remove resources.master_port, or choose a free one", 7
    ),
    Cause.OUT_OF_MEMORY_KILL: Rule(
        "S516",
        "the kernel killed a process for want of memory",
        True,
        2,
        "lower train.micro_batch or data.seq_len, or give the job more memory",
        7,
    ),
    Cause.KILLED: Rule("S517", "a process was killed from outside", True, 3, "see who sends the signal", 6),
    Cause.CRASH: Rule(
        "S518", "a process crashed", True, 2, "see the log; a bus error often means a small /dev/shm", 6
    ),
    Cause.USER_ERROR: Rule("S510", "the training script failed", False, 1, "fix what the traceback shows", 5),
    Cause.HANG: Rule(
        "S519",
        "no sign of life from any process",
        True,
        2,
        "see the logs; raise retry.hang_timeout_s if steps or evaluations really take that long",
        4,
    ),
    Cause.CHECKPOINT: Rule(
        "S523",
        "a checkpoint could not be saved or restored",
        True,
        2,
        "see the log; serai ckpt verify tells what is whole",
        5,
    ),
    Cause.COLLECTIVE: Rule(
        "S520", "the processes lost one another", True, 2, "see the logs of every rank for the first error", 2
    ),
    Cause.LAUNCHER: Rule("S521", "the launcher failed", True, 2, "see launcher.log", 1),
}


def rule_of(cause: Cause) -> Rule:
    return _RULES[cause]


@dataclass(frozen=True)
class Failure:
    """The cause of a failed attempt, traced to a rank."""

    cause: Cause
    rank: int | None
    message: str
    traceback: str | None
    log: Path | None

    @property
    def rule(self) -> Rule:
        return _RULES[self.cause]


_PATTERNS: tuple[tuple[Cause, re.Pattern[str]], ...] = (
    (
        Cause.DISK_FULL,
        re.compile(r"no space left on device|disk quota exceeded|\bENOSPC\b|\[?S303\]?|\bS505\b", re.I),
    ),
    (
        Cause.OUT_OF_MEMORY,
        re.compile(r"out of memory|cannot allocate memory|\bMemoryError\b|OutOfMemoryError", re.I),
    ),
    (Cause.PORT_IN_USE, re.compile(r"address already in use|EADDRINUSE", re.I)),
    (
        Cause.COLLECTIVE,
        re.compile(
            r"connection (?:closed by peer|reset|refused)|broken pipe|gloo|nccl|timed out (?:after \d+ ?ms|waiting)|"
            r"DistBackendError|DistStoreError|DistNetworkError|ProcessGroup\w*|socket timeout",
            re.I,
        ),
    ),
)
_NAMED = {
    "nan": Cause.NOT_A_NUMBER,
    "not_a_number": Cause.NOT_A_NUMBER,
    "oom": Cause.OUT_OF_MEMORY,
    "out_of_memory": Cause.OUT_OF_MEMORY,
    "disk_full": Cause.DISK_FULL,
    "storage_full": Cause.DISK_FULL,
    "spec": Cause.SPEC_ERROR,
    "spec_error": Cause.SPEC_ERROR,
    "collective": Cause.COLLECTIVE,
    "collective_timeout": Cause.COLLECTIVE,
    "hang": Cause.HANG,
    "checkpoint": Cause.CHECKPOINT,
}
_CRASHES = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGABRT,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)
_LOG_TAIL = 64 << 10
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.M)
"""torch.distributed marks every line of an uncaught exception with its rank."""


def classify(
    end: AttemptEnd,
    *,
    errors: Mapping[int, Mapping[str, Any]],
    log_dir: Path,
    hang_s: float | None = None,
    oom_killed: bool = False,
    fixed_port: bool = False,
    disk_full: bool = False,
) -> Failure:
    """The heaviest cause over all ranks; among equals the rank that died first.

    Args:
        end: how the processes ended.
        errors: the ``error`` event of each rank that wrote one.
        log_dir: the attempt's logs, read for ranks that died without a word.
        hang_s: seconds of silence after which the supervisor killed the group, if it did.
        oom_killed: whether the kernel's out-of-memory killer struck while the attempt ran.
        fixed_port: whether the job names its master port (then a busy one will stay busy).
        disk_full: whether the run's disk is full, which explains a rank that could not even say why it failed.
    """
    order = {rank: place for place, (rank, _) in enumerate(end.deaths)}
    candidates = [
        _of_rank(
            rank, code, error=errors.get(rank), log=log_dir / f"rank-{rank:05d}.log", oom_killed=oom_killed
        )
        for rank, code in end.exits.items()
        if code not in (0, 75) and (rank not in end.killed or rank in errors)
    ]
    if hang_s is not None:
        frozen = next(iter(end.frozen), None)
        words = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "stuck inside the kernel"}
        detail = f"; rank {frozen} was {words[end.frozen[frozen]]}" if frozen is not None else ""
        log = log_dir / f"rank-{frozen or 0:05d}.log"
        message = f"no sign of life from any process for {hang_s:.0f} s{detail}"
        candidates.append(Failure(Cause.HANG, frozen, message, None, log))
    if end.launcher_error is not None or not candidates:
        log = log_dir / "launcher.log"
        message = end.launcher_error or "the workers ended without an exit status"
        cause = Cause.PORT_IN_USE if _match(message) is Cause.PORT_IN_USE else Cause.LAUNCHER
        candidates.append(Failure(cause, None, message, _last_traceback(log), log))
    chosen = max(
        candidates,
        key=lambda failure: (
            failure.rule.weight,
            -order.get(-1 if failure.rank is None else failure.rank, 1 << 30),
        ),
    )
    if disk_full and chosen.cause is Cause.USER_ERROR and chosen.traceback is None:
        message = f"the disk under {log_dir} is full (rank {chosen.rank}: {chosen.message})"
        return Failure(Cause.DISK_FULL, chosen.rank, message, None, chosen.log)
    if chosen.cause is Cause.PORT_IN_USE and not fixed_port:
        return Failure(Cause.COLLECTIVE, chosen.rank, chosen.message, chosen.traceback, chosen.log)
    return chosen


def _of_rank(
    rank: int, code: int | None, *, error: Mapping[str, Any] | None, log: Path, oom_killed: bool
) -> Failure:
    if code is not None and code < 0 and error is None:
        number = -code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        if number == signal.SIGKILL and oom_killed:
            return Failure(
                Cause.OUT_OF_MEMORY_KILL,
                rank,
                "killed by the kernel's out-of-memory killer (SIGKILL)",
                None,
                log,
            )
        if number in _CRASHES:
            return Failure(Cause.CRASH, rank, f"crashed ({name})", _last_traceback(log), log)
        return Failure(Cause.KILLED, rank, f"killed from outside ({name})", None, log)
    if error is not None:
        message: str | None = str(error.get("message", ""))
        traceback: str | None = error.get("traceback")
        named = _NAMED.get(str(error.get("cause", "")).lower())
    else:
        message, traceback = _from_error_file(log.with_suffix(".error.json"))
        traceback = traceback or _last_traceback(log)
        message = message or _last_line(traceback) or _last_line(_tail(log))
        named = Cause.SPEC_ERROR if code == 2 else None
    last = _last_line(traceback) or ""
    cause = named or _match(f"{message}\n{last}") or Cause.USER_ERROR
    return Failure(cause, rank, message or f"exit code {code}", traceback or None, log)


def _match(text: str) -> Cause | None:
    return next((cause for cause, pattern in _PATTERNS if pattern.search(text)), None)


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _LOG_TAIL))
            return _RANK_PREFIX.sub("", stream.read().decode(errors="replace"))
    except OSError:
        return ""


def _last_traceback(log: Path) -> str | None:
    """The last Python traceback in a log, down to its final line."""
    text = _tail(log)
    start = text.rfind("Traceback (most recent call last):")
    if start < 0:
        return None
    lines = text[start:].splitlines()
    for count, line in enumerate(lines[1:], start=2):
        if line and not line.startswith((" ", "\t")):
            return "\n".join(lines[:count])
    return "\n".join(lines)


def _last_line(text: str | None) -> str | None:
    lines = [line for line in (text or "").splitlines() if line.strip()]
    return lines[-1].strip() if lines else None


def _from_error_file(path: Path) -> tuple[str | None, str | None]:
    """Message and traceback that torchrun's ``@record`` wrote, if the script uses it."""
    try:
        message = json.loads(path.read_text())["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
    if isinstance(message, dict):
        extra = message.get("extraInfo") or {}
        return str(message.get("message", "")), extra.get("py_callstack")
    return str(message), None
