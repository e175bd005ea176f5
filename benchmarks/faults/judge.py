"""The one rule by which every fault is judged, and the restores that put an image on trial."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import serai
from benchmarks.faults.tally import Outcome
from serai.checkpoint.ranks import Ranks
from serai.checkpoint.restore import restore
from serai.errors import SeraiError
from serai.storage.base import Storage
from serai.storage.local import LocalStorage

__all__ = ["Hung", "Judge", "Saved", "Verdict", "deadline", "make_state"]

Key = tuple[int, int]
LIMIT_S = 10.0


class Hung(Exception):
    """Something took longer than its deadline."""


@contextlib.contextmanager
def deadline(seconds: float = LIMIT_S) -> Iterator[None]:
    """Raise ``Hung`` in the main thread after ``seconds``; no effect in another thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    rings = 0

    def ring(*_: object) -> None:
        nonlocal rings
        rings += 1
        if rings == 3:  # the exception itself is stuck, behind a thread that does not end
            faulthandler.dump_traceback()
            os._exit(3)
        raise Hung(f"nothing came back within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def make_state(mark: int, *, elements: int = 1500) -> dict[str, Any]:
    """A small state, every part of which holds ``mark``, so that bytes of two saves cannot mix unseen."""
    return {
        "model": {
            "weight": torch.full((elements,), float(mark)),
            "bias": torch.full((7, 3), mark, dtype=torch.int64),
            "scale": torch.tensor(float(mark), dtype=torch.float64),
        },
        "half": torch.full((33,), float(mark % 256), dtype=torch.bfloat16),
        "progress": {"mark": mark, "text": f"mark {mark}", "pair": (mark, None)},
    }


def empty_state(elements: int = 1500) -> dict[str, Any]:
    return make_state(0, elements=elements)


def fault_in(state: Mapping[str, Any], mark: int, elements: int = 1500) -> str | None:
    """Where a state is not, bit for bit, the one with that mark; ``None`` when it is."""
    wanted = make_state(mark, elements=elements)
    if state.keys() != wanted.keys():
        return f"keys {sorted(state)}"
    pairs = [(f"model.{name}", state["model"][name], tensor) for name, tensor in wanted["model"].items()]
    for name, have, tensor in [*pairs, ("half", state["half"], wanted["half"])]:
        if have.dtype != tensor.dtype or have.shape != tensor.shape or not torch.equal(have, tensor):
            return f"{name} is not all {mark}"
    return None if state["progress"] == wanted["progress"] else f"progress is {state['progress']}"


@dataclass(frozen=True)
class Saved:
    """A save that was made: its generation, its step and the mark its state carries."""

    key: Key
    step: int
    mark: int


@dataclass(frozen=True)
class Verdict:
    """What came of one trial. ``key`` is the generation that was restored, if any."""

    outcome: Outcome
    detail: str
    key: Key | None = None
    warned: tuple[str, ...] = ()
    generation: str = ""


class Judge:
    """Knows every save that was made in a history and tries images of its root."""

    def __init__(self, saves: Mapping[str, Saved], *, elements: int = 1500) -> None:
        self.saves = saves  # by the name of the generation
        self._elements = elements
        self._pool = ThreadPoolExecutor(2)

    def close(self) -> None:
        self._pool.shutdown()

    def restored(self, storage: Storage, step: int | None = None) -> tuple[Any, dict[str, Any], list[str]]:
        """``(what restore returned or raised, the state afterwards, warnings)``."""
        state = empty_state(self._elements)
        answer: Any
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with deadline():
                    answer = restore(
                        state,
                        ranks=Ranks(),
                        agent=None,
                        storages=[("durable", storage)],
                        step=step,
                        strict=True,
                        pool=self._pool,
                    )
            except (SeraiError, Hung) as error:
                answer = error
        return answer, state, [str(warning.message) for warning in caught]

    def try_restore(
        self, root: Path | Storage, *, least: Key | None, step: int | None = None, may_fail: bool = False
    ) -> Verdict:
        """Restore and judge.

        Args:
            least: the newest generation that must not be lost; ``None`` when none has to be there.
            step: restore that step by name.
            may_fail: an error is allowed, since nothing (or not the named step) verifies.
        """
        storage = root if isinstance(root, Storage) else LocalStorage(root)
        try:
            answer, state, warned = self.restored(storage, step)
        except Exception as error:
            return Verdict(Outcome.WRONG, f"restore raised {type(error).__name__}: {error}")
        if isinstance(answer, Hung):
            return Verdict(Outcome.HUNG, str(answer))
        if isinstance(answer, SeraiError) or answer is None:
            if (damage := fault_in(state, 0, self._elements)) is not None:
                return Verdict(Outcome.WRONG, f"nothing was restored, yet the state changed: {damage}")
            if isinstance(answer, SeraiError):
                if least is not None and not may_fail:
                    return Verdict(Outcome.WRONG, f"{least} is lost: {answer.message}")
                return Verdict(Outcome.ERROR, answer.message)
            if least is not None:
                return Verdict(Outcome.WRONG, f"{least} is lost: there is said to be no checkpoint")
            return Verdict(Outcome.NEWEST, "nothing was durable yet, nothing was restored")
        return self._judge_bytes(answer.generation, answer.step, state, least, tuple(warned))

    def _judge_bytes(
        self, generation: str, step: int, state: Mapping[str, Any], least: Key | None, warned: tuple[str, ...]
    ) -> Verdict:
        saved = self.saves.get(generation)
        if saved is None:
            return Verdict(Outcome.WRONG, f"{generation} was never saved")
        if saved.step != step:
            return Verdict(Outcome.WRONG, f"{generation} came back as step {step}")
        damage = fault_in(state, saved.mark, self._elements)
        if damage is not None:
            return Verdict(Outcome.WRONG, f"{generation} has wrong bytes: {damage}")
        if least is not None and saved.key < least:
            return Verdict(
                Outcome.OLDER, f"{generation} where {least} was durable", saved.key, warned, generation
            )
        return Verdict(Outcome.NEWEST, generation, saved.key, warned, generation)

    def try_load(self, root: Path | Storage, *, like: Verdict) -> Verdict:
        """``serai.load`` must come to the verdict that ``restore`` came to."""
        same: Callable[[str], Verdict] = lambda detail: Verdict(Outcome.WRONG, f"load disagrees: {detail}")  # noqa: E731
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with deadline():
                    state = serai.load(root)
            except SeraiError as error:
                return like if like.key is None else same(error.message)
            except Hung as error:
                return Verdict(Outcome.HUNG, f"load: {error}")
            except Exception as error:
                return same(f"{type(error).__name__}: {error}")
        if like.key is None:
            return same(f"it found mark {state['progress']['mark']}")
        damage = fault_in(state, self.saves[like.generation].mark, self._elements)
        return like if damage is None else same(f"{like.key}: {damage}")
