"""A disk that fails: an error at the n-th call of a save, once or until it is mended, for every n."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
import warnings
from pathlib import Path

import serai
from benchmarks.faults.crashes import scratch
from benchmarks.faults.judge import Judge, Saved, Verdict, make_state
from benchmarks.faults.machine import agent_in_thread
from benchmarks.faults.recorder import Recorder
from benchmarks.faults.tally import Outcome, Tally
from serai.errors import SaveFailed

__all__ = ["count_calls", "strike", "try_failing"]

Key = tuple[int, int]
_LIMIT_S = 20.0


class _Failing:
    """Fails the calls from number ``first`` on: that one only, or every one until ``mended``."""

    def __init__(self, first: int, number: int, *, lasting: bool) -> None:
        self._first = first
        self._number = number
        self._lasting = lasting
        self._count = -1
        self.hits = 0
        self.hit = ""
        self.mended = False
        self.armed = False

    def __call__(self, kind: str, path: str) -> None:
        if not self.armed or self.mended:
            return
        self._count += 1
        if self._count == self._first or (self._lasting and self._count > self._first):
            self.hits += 1
            self.hit = self.hit or f"{kind} {path}"
            raise OSError(self._number, os.strerror(self._number), path)


def count_calls(keep: int) -> int:
    """How many calls the third save of a session makes, its retention included."""
    root = Path(scratch()) / "root"
    counter = _Failing(1 << 30, errno.EIO, lasting=False)
    with Recorder(root, fault=counter), agent_in_thread(root):
        checkpointer = serai.Checkpointer(root, keep=serai.Keep(last=keep))
        for step in (1, 2, 3):
            counter.armed = step == 3
            checkpointer.save(step, make_state(step)).wait("durable", _LIMIT_S)
        checkpointer.close(_LIMIT_S)
    shutil.rmtree(root.parent)
    return counter._count + 1


def strike(first: int, number: int, lasting: bool, keep: int) -> tuple[str, Verdict]:
    """Two saves work, the third meets the fault, then the disk is mended and a fourth must work."""
    folder = Path(scratch())
    root = folder / "root"
    fault = _Failing(first, number, lasting=lasting)
    saves: dict[str, Saved] = {}
    judge = Judge(saves)
    durable: list[Key] = []
    try:
        with Recorder(root, fault=fault), agent_in_thread(root, committed=durable.append) as agent:
            checkpointer = serai.Checkpointer(root, keep=serai.Keep(last=keep), memory=False)

            def save(step: int) -> serai.SaveHandle:
                handle = checkpointer.save(step, make_state(step))
                _, _, attempt, sequence = handle.generation.split("-")
                saves[handle.generation] = Saved((int(attempt), int(sequence)), step, step)
                return handle

            for step in (1, 2):
                save(step).wait("durable", _LIMIT_S)
            fault.armed = True
            handle = save(3)
            said = _outcome(handle)
            told = max(durable, default=None)
            # While the disk is still broken: what is visible must be right, and nothing durable lost.
            verdict = judge.try_restore(root, least=told)
            fault.mended = True
            if said == "stuck":
                return fault.hit, Verdict(Outcome.HUNG, f"save 3 neither arrived nor failed ({fault.hit})")
            if said == "failed" and handle.error is not None and not handle.error.message:
                return fault.hit, Verdict(Outcome.WRONG, "the failure has no reason")
            if said == "durable" and (verdict.key or (0, 0)) < (1, 2):
                return fault.hit, Verdict(Outcome.WRONG, f"said durable, but {verdict.detail} ({fault.hit})")
            if verdict.outcome in (Outcome.WRONG, Outcome.OLDER, Outcome.HUNG):
                return fault.hit, Verdict(Outcome.WRONG, f"{verdict.detail} ({fault.hit})")
            try:
                save(4).wait("durable", _LIMIT_S)
                checkpointer.close(_LIMIT_S)
            except SaveFailed as error:
                outcome = Outcome.HUNG if error.code == "S416" else Outcome.WRONG
                return fault.hit, Verdict(outcome, f"the save after the fault failed: {error.message}")
            dead = [tier.name for tier in agent._tiers if not tier._thread.is_alive()]
            if dead:
                return fault.hit, Verdict(Outcome.WRONG, f"the thread of tier {dead} died ({fault.hit})")
        after = judge.try_restore(root, least=max(durable))
        if after.key != (1, 3):
            return fault.hit, Verdict(Outcome.WRONG, f"after mending: {after.detail} ({fault.hit})")
        # Told of a failure: the newest that was durable before is what was there in the meantime.
        return fault.hit, verdict if said == "durable" else Verdict(
            Outcome.ERROR, f"save reported: {fault.hit}"
        )
    finally:
        judge.close()
        shutil.rmtree(folder, ignore_errors=True)


def _outcome(handle: serai.SaveHandle) -> str:
    limit = time.monotonic() + _LIMIT_S
    while time.monotonic() < limit:
        if handle.done("durable"):
            return "durable"
        if handle.error is not None:
            try:
                handle.wait("durable", 0)
            except SaveFailed:
                return "failed"
            return "durable"
        time.sleep(0.001)
    return "stuck"


def try_failing(tally: Tally, *, stride: int = 1) -> None:
    """``stride`` 1 strikes at every call; a larger one at every n-th, each kind of error in turn."""
    logging.getLogger("serai.agent").setLevel(logging.CRITICAL)  # thousands of failures are meant
    number = 0
    for keep in (1, 2):
        for first in range(count_calls(keep)):
            for code in (errno.ENOSPC, errno.EIO):
                for lasting in (False, True):
                    number += 1
                    if number % stride:
                        continue
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        hit, verdict = strike(first, code, lasting, keep)
                    if not hit:
                        continue  # the save was over before its turn came
                    name = errno.errorcode[code]
                    kind = f"{name} at {hit.split()[0]}"
                    tally.add(kind, verdict.outcome, f"call {first} of save 3, keep={keep}: {verdict.detail}")
