"""Where the supervisor speaks to a person. The command line brings its own; this one needs nothing."""

from __future__ import annotations

import sys
from typing import Protocol

__all__ = ["Console", "PlainConsole", "SilentConsole"]


class Console(Protocol):
    """Two kinds of words: lines that stay, and one live line that is replaced."""

    def line(self, text: str) -> None:
        """Say something that stays."""

    def live(self, text: str) -> None:
        """Show the current state: replace the live line on a terminal; elsewhere print one every few seconds."""

    @property
    def live_interval(self) -> float:
        """Seconds between two ``live`` calls: a fraction on a terminal, some seconds elsewhere."""
        ...


class PlainConsole:
    """Lines on stderr; a terminal gets a live line."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._open = False

    @property
    def live_interval(self) -> float:
        return 0.2 if self._terminal else 5.0

    def line(self, text: str) -> None:
        prefix = "\r\x1b[K" if self._open else ""
        self._open = False
        print(f"{prefix}{text}", file=sys.stderr, flush=True)

    def live(self, text: str) -> None:
        if self._terminal:
            self._open = True
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


class SilentConsole:
    """Says nothing (``--quiet``)."""

    live_interval = 3600.0

    def line(self, text: str) -> None:
        pass

    def live(self, text: str) -> None:
        pass
