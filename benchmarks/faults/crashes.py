"""Crash images: real histories are recorded, and every legal outcome of a crash at every call is restored."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import serai
from benchmarks.faults.crash import Disk, Image, Projector, read_tree, variants
from benchmarks.faults.judge import Judge, Saved, make_state
from benchmarks.faults.machine import agent_in_thread
from benchmarks.faults.recorder import Call, Recorder
from benchmarks.faults.tally import Outcome, Tally
from serai.errors import SaveFailed

__all__ = ["HISTORIES", "History", "Plot", "record", "scratch", "try_history"]

Key = tuple[int, int]
_WAIT_S = 60.0


@dataclass
class History:
    """A recording, the folder it began with, and every save that was made in it."""

    name: str
    calls: list[Call]
    saves: dict[str, Saved]
    start: Image = field(default_factory=dict)
    start_durable: Key | None = None


def scratch() -> str:
    """A folder in memory where there is one: flushes cost nothing there, and the model does the losing."""
    return tempfile.mkdtemp(
        prefix="serai-faults-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )


class Plot:
    """What a history may do: save, wait, restart, break the disk."""

    def __init__(self, root: Path, recorder: Recorder, saves: dict[str, Saved]) -> None:
        self.root = root
        self.recorder = recorder
        self.saves = saves
        self._mark = max((saved.mark for saved in saves.values()), default=0)

    def run(self, steps: list[int], *, keep: serai.Keep, full_at: int | None = None) -> None:
        """One attempt: save each step and wait until it is durable.

        With ``full_at`` the disk is full at the n-th writing call of the second save, which must fail,
        and has room again afterwards.
        """
        with agent_in_thread(self.root, committed=self.recorder.mark_durable):
            checkpointer = serai.Checkpointer(self.root, keep=keep)
            for number, step in enumerate(steps):
                self._mark += 1
                if number == 1 and full_at is not None:
                    self.recorder.fault = _full_after(full_at)
                handle = checkpointer.save(step, make_state(self._mark))
                saved = Saved(_key(handle.generation), step, self._mark)
                self.saves[handle.generation] = saved
                if self.recorder.fault is not None:
                    self._expect_failure(handle)
                _await(handle)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the full disk was told of; what follows worked
                checkpointer.close(_WAIT_S)

    def _expect_failure(self, handle: serai.SaveHandle) -> None:
        try:
            handle.wait("durable", _WAIT_S)
        except SaveFailed:
            self.recorder.fault = None
            return
        raise AssertionError("a save on a full disk said that it is durable")


def _await(handle: serai.SaveHandle) -> None:
    """Until it is durable, later tries included."""
    limit = time.monotonic() + _WAIT_S
    while not handle.done("durable"):
        if time.monotonic() > limit:
            raise AssertionError(f"step {handle.step} never became durable: {handle.error}")
        time.sleep(0.002)


def _key(generation: str) -> Key:
    _, _, attempt, sequence = generation.split("-")
    return int(attempt), int(sequence)


def _full_after(count: int) -> Callable[[str, str], None]:
    left = [count]

    def fault(kind: str, path: str) -> None:
        if kind in ("create", "write", "allocate", "truncate", "mkdir", "sync"):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    return fault


def _two_kept(plot: Plot) -> None:
    plot.run([10, 20, 30, 40], keep=serai.Keep(last=2))


def _one_kept(plot: Plot) -> None:
    plot.run([1, 2, 3], keep=serai.Keep(last=1))


def _same_step(plot: Plot) -> None:
    plot.run([7, 7, 7], keep=serai.Keep(last=2))


def _second_attempt(plot: Plot) -> None:
    plot.run([5, 6], keep=serai.Keep(last=2))
    plot.run([6, 7], keep=serai.Keep(last=1))


def _full_disk(plot: Plot) -> None:
    plot.run([3, 4, 5], keep=serai.Keep(last=1), full_at=3)


def _every_and_best(plot: Plot) -> None:
    plot.run([1, 2, 3, 4], keep=serai.Keep(last=1, every=2))


HISTORIES: dict[str, Callable[[Plot], None]] = {
    "keep=2": _two_kept,
    "keep=1": _one_kept,
    "the same step again": _same_step,
    "a second attempt": _second_attempt,
    "a full disk, then room": _full_disk,
    "every=2": _every_and_best,
}


def record(
    name: str, act: Callable[[Plot], None], start: Image | None = None, saves: dict[str, Saved] | None = None
) -> History:
    """Run a history on a real folder and prove that the recording is complete."""
    root = Path(scratch()) / "root"
    if start is not None:
        Projector(root).show(start)
    known = dict(saves or {})
    with Recorder(root) as recorder:
        act(Plot(root, recorder, known))
    disk = Disk(start)
    for call in recorder.calls:
        disk.play(call)
    there, played = read_tree(root) if root.exists() else {}, disk.everything()
    shutil.rmtree(root.parent)
    if there != played:
        differing = sorted(k for k in there.keys() | played.keys() if there.get(k, "-") != played.get(k, "-"))
        raise AssertionError(f"the recording of {name!r} misses calls: {differing[:6]} differ")
    return History(name, recorder.calls, known, start or {})


def try_history(history: History, tally: Tally, *, seed: int, per_point: int, load_every: int = 4) -> None:
    """Restore from every distinct crash image of a history."""
    rng = random.Random(f"{seed}/{history.name}")
    judge = Judge(history.saves)
    projector = Projector(Path(scratch()) / "image")
    seen: set[tuple[str, Key | None]] = set()
    try:
        for point, kind, image, newest in variants(history.calls, rng, per_point, history.start):
            least = max(filter(None, (newest, history.start_durable)), default=None)
            fingerprint = projector.show(image)
            if (fingerprint, least) in seen:
                continue
            seen.add((fingerprint, least))
            verdict = judge.try_restore(projector.root, least=least)
            if verdict.outcome is Outcome.OLDER:
                verdict = type(verdict)(Outcome.WRONG, "lost: " + verdict.detail)
            if verdict.outcome not in (Outcome.WRONG, Outcome.HUNG) and len(seen) % load_every == 0:
                verdict = judge.try_load(projector.root, like=verdict)
            last = history.calls[point - 1] if point else None
            tally.add(
                kind,
                verdict.outcome,
                f"history {history.name!r}, after call {point}"
                f" ({f'{last.kind} {last.target or last.path}' if last else 'none'}): {verdict.detail}",
            )
    finally:
        judge.close()
        shutil.rmtree(projector.root.parent)
