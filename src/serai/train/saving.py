"""Saves of a training run, and what became of each."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

from serai.errors import SaveFailed, SeraiError
from serai.train.reporting import Reporter

__all__ = ["CheckpointerLike", "Checkpoints", "HandleLike"]

_ENOUGH_STEPS = 5
"""Steps without a save beside them that must be known before inflation is told."""


class HandleLike(Protocol):
    """What this room uses of a ``serai.SaveHandle``."""

    @property
    def generation(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def stall(self) -> Any: ...
    @property
    def error(self) -> SeraiError | None: ...
    @property
    def superseded_by(self) -> int | None: ...
    def done(self, tier: str = "durable") -> bool: ...
    def wait(self, tier: str = "durable", timeout: float | None = None) -> None: ...


class CheckpointerLike(Protocol):
    """What this room uses of a ``serai.Checkpointer``."""

    def restore(self, state: dict[str, Any]) -> Any: ...
    def save(self, step: int, state: dict[str, Any], *, metrics: dict[str, float] | None = None) -> Any: ...
    def close(self, timeout: float | None = None) -> None: ...


@dataclass
class _Pending:
    step: int
    handle: HandleLike
    saved_at: float
    longer: float = 0.0


class Checkpoints:
    """Saves and restores one state, and reports it.

    Args:
        every: steps between saves.
        state: what is saved; restored in place.
    """

    def __init__(
        self, checkpointer: CheckpointerLike, state: dict[str, Any], reporter: Reporter, *, every: int
    ) -> None:
        self._checkpointer = checkpointer
        self._state = state
        self._reporter = reporter
        self._every = every
        self._pending: list[_Pending] = []
        self._calm: deque[float] = deque(maxlen=50)
        self._newest_failure: SeraiError | None = None
        self.saved_step: int | None = None

    def restore(self) -> int:
        """Fill the state from the newest verified checkpoint; returns its step, 0 if there is none."""
        restored = self._checkpointer.restore(self._state)
        if restored is None:
            return 0
        self._reporter.write(
            "restored",
            step=restored.step,
            tier=str(restored.tier),
            generation=str(restored.generation),
            seconds=restored.seconds,
        )
        self.saved_step = int(restored.step)
        return int(restored.step)

    def due(self, step: int) -> bool:
        return step % self._every == 0

    def save(self, step: int, *, loss: float) -> None:
        """Begin a save; a step that is already saved is left alone."""
        if self.saved_step == step:
            return
        handle: HandleLike = self._checkpointer.save(step, self._state, metrics={"loss": loss})
        self.saved_step = step
        self._newest_failure = None
        self._pending.append(_Pending(step, handle, time.monotonic()))
        self._reporter.write(
            "save", step=step, generation=handle.generation, bytes=handle.bytes, **_stall(handle)
        )

    def observe(self, seconds: float) -> None:
        """Take in the length of a step: what steps beside a save take longer is that save's inflation."""
        if not self._pending:
            self._calm.append(seconds)
        elif len(self._calm) >= _ENOUGH_STEPS:
            newest = self._pending[-1]
            newest.longer += seconds - statistics.median(self._calm)
            # Single steps vary both ways; only a sum that is longer says anything.
            newest.handle.stall.inflation = max(newest.longer, 0.0)

    def notice(self) -> None:
        """Report saves that have become durable since the last call, and those that failed."""
        for pending in list(self._pending):
            handle = pending.handle
            if handle.superseded_by is not None:
                # A slow tier took a newer save instead, which has an entry of its own.
                self._pending.remove(pending)
                self._reporter.write("superseded", step=pending.step, by=handle.superseded_by)
            elif handle.done("durable"):
                self._pending.remove(pending)
                self._report_durable(pending)
            elif handle.error is not None:
                self._pending.remove(pending)
                self._reporter.write(
                    "save_failed", step=pending.step, message=str(handle.error), code=handle.error.code
                )
                if pending.step == self.saved_step:
                    self._newest_failure = handle.error

    def wait(self, *, timeout: float) -> None:
        """Wait until the newest save is durable.

        Raises:
            SeraiError: what made it fail.
            SaveFailed: it was not durable within ``timeout`` seconds (S606).
        """
        if self._newest_failure is not None:
            raise self._newest_failure
        deadline = time.monotonic() + timeout
        while self._pending and not self._pending[-1].handle.done("durable"):
            pending = self._pending[-1]
            try:
                # In short pieces, so that a supervisor sees that this process lives.
                pending.handle.wait("durable", timeout=1.0)
            except SaveFailed:
                if pending.handle.error is not None:
                    raise
                self._reporter.beat(step=pending.step, waiting_for="durable")
                if time.monotonic() >= deadline:
                    raise SaveFailed(
                        f"the checkpoint of step {pending.step} was not durable within {timeout:.0f} s",
                        code="S606",
                        where=pending.handle.generation,
                        expected="storage that takes one checkpoint in that time",
                        next_step="raise `retry.stop_grace_s`; `serai run` goes on from the one before",
                    ) from None
        self.notice()

    def close(self, *, timeout: float) -> None:
        self._checkpointer.close(timeout=timeout)

    def _report_durable(self, pending: _Pending) -> None:
        self._reporter.write(
            "durable",
            step=pending.step,
            generation=pending.handle.generation,
            seconds_after_save=time.monotonic() - pending.saved_at,
            **_stall(pending.handle),
        )


def _stall(handle: HandleLike) -> dict[str, float]:
    """The five terms of the stall, seconds, as far as they are known by now."""
    stall = handle.stall
    return {
        f"{term}_s": float(getattr(stall, term))
        for term in ("call", "gate", "inflation", "back_pressure", "finalise")
    }
