"""Repeats what may pass by itself: exponential backoff, full jitter, and always a deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from serai.errors import StorageTransient

__all__ = ["Retry"]

T = TypeVar("T")


@dataclass
class Retry:
    """Seconds everywhere. The pause before try *n* is uniform in ``[0, min(longest, first · 2ⁿ)]``.

    Full jitter, because a thousand ranks that were refused in one moment must not come back in one
    moment (the sum of waiting is lowest with it, at the price of an occasional immediate try).
    """

    deadline: float = 120.0
    first: float = 0.1
    longest: float = 10.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    uniform: Callable[[float, float], float] = field(default=random.uniform)

    def __call__(self, act: Callable[[int], T], *, deadline: float | None = None) -> T:
        """``act(tries so far)`` until it succeeds, raises something lasting, or the time is over.

        ``act`` raises ``StorageTransient`` for what is worth another try; the last one is raised when
        the next try would begin after the deadline.
        """
        limit = self.clock() + (self.deadline if deadline is None else deadline)
        tries = 0
        while True:
            try:
                return act(tries)
            except StorageTransient as error:
                pause = self.uniform(0, min(self.longest, self.first * 2 ** min(tries, 20)))
                tries += 1
                if self.clock() + pause >= limit:
                    error.message = f"{error.message} (after {tries} tries)"
                    raise
                self.sleep(pause)
