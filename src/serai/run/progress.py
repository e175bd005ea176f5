"""What the ranks' events tell while they train: step, loss, speed, checkpoints, errors, signs of life."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import deque
from typing import Any

from serai.events import follow_events
from serai.run.workspace import Run
from serai.units import format_duration

__all__ = ["Progress"]


class Progress:
    """Follows every rank's event file of a run. ``poll`` reads what is new.

    Attributes:
        step: newest step of any attempt, or ``None``.
        attempt_step: newest step of this attempt, or ``None``.
        durable: newest durable checkpoint as (step, unix seconds), or ``None``.
        errors: the ``error`` event of each rank in this attempt.
        stopped: the ``stopped`` event of each rank in this attempt.
        restored: this attempt's ``restored`` event, or ``None``.
    """

    def __init__(self, run: Run, *, total_steps: int | None, script: bool = False) -> None:
        self._run = run
        self._total = total_steps
        self._script = script
        self._offsets: dict[int, int] = {}
        self.step: int | None = None
        self.attempt_step: int | None = None
        self.loss: float | None = None
        self.tokens_per_s: float | None = None
        self.durable: tuple[int, float] | None = None
        self.errors: dict[int, dict[str, Any]] = {}
        self.stopped: dict[int, dict[str, Any]] = {}
        self.restored: dict[str, Any] | None = None
        self.evaluation: dict[str, Any] | None = None
        self._times: deque[tuple[int, float]] = deque(maxlen=33)
        self._life = time.monotonic()
        self._sizes: dict[int, int] = {}
        self.poll()
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forget what belonged to the attempt before; steps and checkpoints stay known."""
        self.errors, self.stopped, self.restored = {}, {}, None
        self.attempt_step = None
        self._times.clear()
        self._life = time.monotonic()

    def poll(self) -> list[dict[str, Any]]:
        """New events of all ranks, taken in."""
        news = []
        for rank, path in self._run.rank_event_files().items():
            try:
                size = os.stat(path).st_size
            except FileNotFoundError:
                continue
            if size == self._sizes.get(rank):
                continue
            self._sizes[rank] = size
            for event, offset in follow_events(path, self._offsets.get(rank, 0)):
                self._offsets[rank] = offset
                self._take(rank, event)
                news.append({"rank": rank, **event})
        if news:
            self._life = time.monotonic()
        return news

    def _take(self, rank: int, event: dict[str, Any]) -> None:
        match event.get("kind"):
            case "step" if rank == 0:
                self.step = self.attempt_step = int(event["step"])
                self._times.append((self.step, float(event["time"])))
                self.loss = event.get("loss", self.loss)
                self.tokens_per_s = event.get("tokens_per_s")
            case "durable":
                found = (int(event["step"]), float(event["time"]))
                self.durable = max(found, self.durable or found)
            case "restored" if self.restored is None:
                self.restored = event
            case "evaluation":
                self.evaluation = event
            case "error":
                self.errors.setdefault(rank, event)
            case "stopped":
                self.stopped[rank] = event

    def saw_durable(self, step: int, when: float, *, loss: float | None = None) -> bool:
        """A durable checkpoint learnt from the catalog (scripts that write no events); True when it is news."""
        if self.durable is not None and (step, when) <= self.durable:
            return False
        self.durable = (step, when)
        if self._script and loss is not None:
            self.loss = loss
        return True

    @property
    def silence(self) -> float:
        """Seconds since the last event of any rank, or since the attempt began."""
        return time.monotonic() - self._life

    @property
    def seconds_per_step(self) -> float | None:
        """Median over the last steps, saves and evaluations between them included in the mean sense."""
        times = list(self._times)
        gaps = [
            (after[1] - before[1]) / (after[0] - before[0])
            for before, after in itertools.pairwise(times)
            if after[0] > before[0]
        ]
        return statistics.median(gaps) if gaps else None

    def line(self, *, elapsed: float) -> str:
        """The live line: step, loss, tokens/s, time left, age of the newest durable checkpoint."""
        parts = []
        if self.attempt_step is None and self._script:
            parts.append(f"running ({format_duration(elapsed)})")
            if self.loss is not None and self.durable is not None:
                parts.append(f"loss {self.loss:.4f} at step {self.durable[0]}")
        elif self.attempt_step is None:
            parts.append(f"starting ({format_duration(elapsed)})" if self.step is None else "resuming")
        else:
            total = f"/{self._total}" if self._total else ""
            parts.append(f"step {self.attempt_step}{total}")
            if isinstance(self.loss, float):
                parts.append(f"loss {self.loss:.4f}")
            if self.tokens_per_s:
                parts.append(f"{_thousands(float(self.tokens_per_s))} tokens/s")
            pace = self.seconds_per_step
            if pace is not None and self._total and self._total > self.attempt_step:
                parts.append(f"{format_duration(pace * (self._total - self.attempt_step))} left")
        if self.durable is None:
            parts.append("no durable checkpoint yet")
        else:
            age = max(0.0, time.time() - self.durable[1])
            parts.append(f"durable: step {self.durable[0]}, {format_duration(max(age, 1.0))} old")
        return " · ".join(parts)


def _thousands(value: float) -> str:
    return (
        f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value / 1e3:.1f} k" if value >= 1e4 else f"{value:.0f}"
    )
