"""Stop requests: Ctrl-C, SIGTERM and ``serai stop`` become two flags that the supervisor's loop reads."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopRequested", "StopRequests"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(BaseException):
    """Raised in the midst of work that may be interrupted anywhere (preparing data: cached by content)."""


class StopRequests:
    """Counts requests: one means save and stop, two mean stop now.

    The handler only counts, except inside ``interruptible``. Outside of the main thread Python allows no
    handlers; then only the stop file counts.
    """

    def __init__(self, stop_file: Path) -> None:
        self._file = stop_file
        self._interrupt = False
        self._previous: dict[signal.Signals, Any] = {}
        self.count = 0
        self.by = ""

    def __enter__(self) -> StopRequests:
        self._file.unlink(missing_ok=True)
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # nohup: the run is meant to outlive its terminal
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.by = self.by or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        if self._interrupt:
            self._interrupt = False
            raise StopRequested

    def look(self) -> int:
        """How often a stop was requested so far; the stop file counts for one."""
        try:
            document = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return self.count
        self.by = str(document.get("by", "serai stop"))
        self.count = max(self.count, 1)
        return self.count

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, the first request raises ``StopRequested`` at once."""
        if self.look():
            raise StopRequested
        self._interrupt = True
        try:
            yield
        finally:
            self._interrupt = False
