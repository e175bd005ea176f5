"""What to keep, when to save, and what to do when a save fails."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from serai.errors import SpecError

__all__ = ["Keep", "retained"]


@dataclass(frozen=True)
class Keep:
    """Which generations retention leaves alone.

    Args:
        last: the newest this many (at least 1).
        every: also every generation whose step is a multiple of this.
        best: also the best by a metric given to ``save``: ``"loss"`` (smallest) or ``"max:accuracy"``.
    """

    last: int = 2
    every: int | None = None
    best: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.last, bool) or not isinstance(self.last, int) or self.last < 1:
            raise SpecError(
                f"Keep(last={self.last!r})",
                code="S120",
                expected="an integer of at least 1",
                next_step="Keep(last=2)",
            )
        if self.every is not None and (
            isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1
        ):
            raise SpecError(
                f"Keep(every={self.every!r})", code="S120", expected="a positive number of steps, or None"
            )
        if self.best is not None and not isinstance(self.best, str):
            raise SpecError(f"Keep(best={self.best!r})", code="S120", expected='"loss" or "max:accuracy"')


@dataclass(frozen=True)
class Candidate:
    """What retention knows of a generation."""

    key: tuple[int, int]
    step: int
    metrics: dict[str, float]
    pinned: bool = False


def retained(candidates: Iterable[Candidate], keep: Keep) -> set[tuple[int, int]]:
    """The keys to keep: the newest ``last``, every multiple of ``every``, the best, and what is pinned."""
    ordered = sorted(candidates, key=lambda candidate: candidate.key, reverse=True)
    kept = {candidate.key for candidate in ordered[: keep.last]}
    kept |= {candidate.key for candidate in ordered if candidate.pinned}
    if keep.every:
        kept |= {candidate.key for candidate in ordered if candidate.step % keep.every == 0}
    if keep.best:
        mode, _, metric = keep.best.rpartition(":")
        sign = -1.0 if mode == "max" else 1.0
        scored = [
            (sign * candidate.metrics[metric], candidate)
            for candidate in ordered
            if metric in candidate.metrics and not math.isnan(candidate.metrics[metric])
        ]
        if scored:
            kept.add(min(scored, key=lambda pair: pair[0])[1].key)
    return kept
