"""What ``save`` returns: where the save is, and what it cost."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from serai.errors import SaveFailed, SeraiError

__all__ = ["SaveHandle", "Stall"]


@dataclass
class Stall:
    """What a save took from training, in seconds. Five terms, always all reported.

    Attributes:
        call: inside ``save``, waiting for a slot left out.
        gate: the GPU's wait before the optimizer step (0 where every copy ended inside ``save``).
        inflation: by how much steps are longer while the save is under way (filled in by whoever times steps).
        back_pressure: waiting inside ``save`` for a free slot, since earlier saves were still being written.
        finalise: inside ``wait`` or ``close``, waiting for this save.
    """

    call: float = 0.0
    gate: float = 0.0
    inflation: float = 0.0
    back_pressure: float = 0.0
    finalise: float = 0.0

    @property
    def total(self) -> float:
        return self.call + self.gate + self.inflation + self.back_pressure + self.finalise


@dataclass
class SaveHandle:
    """One save. Thread safe.

    Attributes:
        step: the step given to ``save``.
        generation: the name of its folder.
        bytes: what this rank writes.
        superseded_by: the newer step that took its place on a tier that could not keep up, if any.
    """

    step: int
    generation: str
    sequence: int
    bytes: int = 0
    stall: Stall = field(default_factory=Stall)
    superseded_by: int | None = None
    started: float = field(default_factory=time.monotonic)
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)
    _done: dict[str, float] = field(default_factory=dict, repr=False)
    _error: SeraiError | None = field(default=None, repr=False)
    _reported: bool = field(default=False, repr=False)

    def done(self, tier: str = "durable") -> bool:
        """Whether it has arrived at ``memory``, ``local`` or ``durable``."""
        with self._changed:
            return tier in self._done

    def seconds(self, tier: str = "durable") -> float | None:
        """How long after the call it arrived there."""
        with self._changed:
            arrived = self._done.get(tier)
            return None if arrived is None else arrived - self.started

    @property
    def error(self) -> SeraiError | None:
        with self._changed:
            return self._error

    def wait(self, tier: str = "durable", timeout: float | None = None) -> None:
        """Block until it arrived. Raises what made it fail, or ``SaveFailed`` (S416) after ``timeout`` seconds.

        A save that a newer one superseded is waited for through the newer one.
        """
        began = time.monotonic()
        deadline = None if timeout is None else began + timeout
        with self._changed:
            while tier not in self._done:
                if self._error is not None:
                    self._reported = True
                    raise self._error
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise SaveFailed(
                        f"step {self.step} was not {tier} within {timeout:.1f} s",
                        code="S416",
                        where=self.generation,
                        next_step="wait longer, or look at handle.error and the agent's log",
                    )
                self._changed.wait(1.0 if remaining is None else min(1.0, remaining))
            self.stall.finalise += time.monotonic() - began

    # For the checkpointer

    def arrive(self, tier: str) -> None:
        with self._changed:
            self._done.setdefault(tier, time.monotonic())
            if tier == "durable":
                self._error = None
            self._changed.notify_all()

    def fail(self, error: SeraiError) -> None:
        with self._changed:
            if "durable" not in self._done:
                self._error = error
            self._changed.notify_all()

    @property
    def settled(self) -> bool:
        with self._changed:
            return "durable" in self._done or self._error is not None
