"""``history.jsonl``: one line for every generation that was committed to a local root or removed from it.

Only for people and reports: nothing reads it to decide anything, and a line that cannot be written is
lost without a word to the trainer. Object stores cannot append and have none.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serai.storage.base import Storage
from serai.storage.local import LocalStorage

__all__ = ["HISTORY", "append_history", "read_history"]

log = logging.getLogger("serai.agent")

HISTORY = "history.jsonl"


def append_history(
    storage: Storage, event: str, step: int | None, name: str, nbytes: int, seconds: float
) -> None:
    """Append one line, whole or not at all; ``event`` is ``committed`` or ``removed``. Never raises."""
    if not isinstance(storage, LocalStorage):
        return
    line = {
        "time": time.time(),
        "event": event,
        "step": step,
        "name": name,
        "bytes": nbytes,
        "seconds": round(seconds, 6),
    }
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(storage.path / HISTORY, flags, 0o666)
        try:
            # One write in append mode: lines of two processes never mix.
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        log.warning("history of %s not written: %s", storage.url, error)


def read_history(root: Path) -> Iterator[dict[str, Any]]:
    """The lines of a local root, oldest first; lines that a full disk cut short are left out."""
    try:
        data = (root / HISTORY).read_bytes()
    except FileNotFoundError:
        return
    for line in data.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict) and {"time", "event", "name"} <= document.keys():
            yield document
