"""A stop request is a flag: the handler sets it, the loop acts on it at the next step boundary."""

from __future__ import annotations

import signal
from types import FrameType

__all__ = ["StopFlag"]


class StopFlag:
    """Set by SIGTERM and SIGINT. A second SIGINT interrupts at once.

    Attributes:
        reason: name of the signal, or ``None`` while nobody asked.
    """

    def __init__(self) -> None:
        self.reason: str | None = None

    def listen(self) -> None:
        """Install the handlers (main thread only)."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason == "SIGINT":
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
