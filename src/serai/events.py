"""Events as JSON lines: one file a process, appended with one ``write`` each, readable while written.

A line is ``{"time": unix seconds, "kind": str, ...}``. A torn last line (a process killed while
writing) is skipped by the reader and repaired by the next writer, so a log never stops being readable.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["EventWriter", "follow_events", "read_events"]


class EventWriter:
    """Appends events to one file. ``common`` fields (``rank=0``) go into every line. Thread safe."""

    def __init__(self, path: str | Path, **common: Any) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._common = common
        self._lock = threading.Lock()
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"time": time.time(), "kind": kind, **self._common, **fields}, allow_nan=True)
        with self._lock:
            os.write(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_events(path: str | Path, *, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Every whole event of a file, in order; of one kind if given. A missing file has none."""
    for event, _ in follow_events(path):
        if kind is None or event.get("kind") == kind:
            yield event


def follow_events(path: str | Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Events from a byte offset on, each with the offset behind it, to go on from there later."""
    try:
        stream = open(path, "rb")
    except FileNotFoundError:
        return
    with stream:
        stream.seek(offset)
        for line in stream:
            offset += len(line)
            if not line.endswith(b"\n"):
                return
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event, offset
