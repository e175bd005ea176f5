"""Whether to relaunch, when, and why not."""

from __future__ import annotations

from dataclasses import dataclass

from serai.run.causes import Cause, Failure
from serai.run.config import RetryConfig

__all__ = ["Decision", "RetryPolicy"]

_LONGEST_DELAY_S = 300.0


@dataclass(frozen=True)
class Decision:
    """``delay`` seconds to wait before the relaunch; ``reason`` says why there is none."""

    relaunch: bool
    delay: float
    reason: str


class RetryPolicy:
    """Relaunches by cause, up to ``retry.max``, and gives up on what repeats itself without progress.

    Progress is a step that no attempt had reached before, or a newer durable checkpoint.
    """

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self.relaunches = 0
        self._last: tuple[Cause, int | None] | None = None
        self._repeats = 0
        self._idle = 0
        self._best: tuple[int, int] = (-1, -1)

    def after(self, failure: Failure, *, step: int | None, durable: int | None) -> Decision:
        """Decide after a failed attempt that reached ``step`` with ``durable`` as newest durable checkpoint."""
        best = (
            max(self._best[0], -1 if step is None else step),
            max(self._best[1], -1 if durable is None else durable),
        )
        progressed = best != self._best
        self._best = best
        signature = (failure.cause, step)
        self._repeats = self._repeats + 1 if signature == self._last and not progressed else 1
        self._last = signature
        self._idle = 0 if progressed else self._idle + 1
        rule = failure.rule
        if not rule.retry:
            return Decision(False, 0.0, "a relaunch would fail in the same way")
        if self._repeats >= rule.patience:
            where = f"at step {step}" if step is not None else "before the first step"
            return Decision(False, 0.0, f"{self._repeats} failures in a row {where} without progress")
        if self.relaunches >= self._config.max:
            return Decision(False, 0.0, f"retry.max = {self._config.max} relaunches are used up")
        self.relaunches += 1
        delay = 0.0
        if self._idle:
            delay = min(self._config.backoff_s * 2 ** (self._idle - 1), _LONGEST_DELAY_S)
        return Decision(True, delay, "")
