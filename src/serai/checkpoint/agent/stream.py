"""Saving through a small window when memory cannot hold a snapshot.

The trainer fills the window, the agent hashes and writes it, and so on: ``save`` then lasts as long as the
disk, which the preflight says, and memory stays bounded.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from serai.checkpoint.agent.ledger import ShardFile
from serai.checkpoint.hashing import CHUNK_BYTES, hex_digest
from serai.errors import SaveFailed, SeraiError
from serai.storage.base import Storage

__all__ = ["WINDOW_BYTES", "StreamedFile"]

WINDOW_BYTES = 4 * CHUNK_BYTES
_DEADLINE_S = 600.0


class StreamedFile:
    """One file that is being written as it is copied. ``write`` in order, then ``finish``."""

    def __init__(self, storage: Storage, key: str, file: ShardFile) -> None:
        self._file = file
        self._storage = storage
        self._key = key
        self._given: queue.Queue[memoryview | None] = queue.Queue(1)
        self._taken = threading.Semaphore(0)
        self._error: SeraiError | None = None
        self._thread = threading.Thread(target=self._run, name="serai-stream", daemon=True)
        self._thread.start()

    def write(self, view: memoryview) -> None:
        """Returns when the bytes are written and the window may be refilled. Raises what the storage raised."""
        for offset in range(0, len(view), CHUNK_BYTES):
            chunk = view[offset : offset + CHUNK_BYTES]
            self._file.chunks[len(self._file.chunks)] = hex_digest(chunk)
            self._given.put(chunk, timeout=_DEADLINE_S)
        self._given.put(view[:0], timeout=_DEADLINE_S)
        if not self._taken.acquire(timeout=_DEADLINE_S):
            raise SaveFailed(
                f"{self._key} was not written within {_DEADLINE_S:.0f} s", code="S416", where=self._key
            )
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        self._given.put(None, timeout=_DEADLINE_S)
        self._thread.join(_DEADLINE_S)
        if self._error is not None:
            raise self._error
        self._storage.verify_size(self._key, self._file.size)

    def cancel(self) -> None:
        """Let the thread end; what it wrote has no manifest and never becomes visible."""
        self._error = self._error or SaveFailed("the stream was given up", code="S404")
        try:
            self._given.put_nowait(None)
        except queue.Full:
            pass

    def _chunks(self) -> Iterator[memoryview]:
        while (view := self._given.get()) is not None:
            if len(view):
                yield view
            else:
                self._taken.release()  # everything before the empty one has been consumed

    def _run(self) -> None:
        try:
            self._storage.upload(self._key, self._chunks(), self._file.size)
        except SeraiError as error:
            self._error = error
        except Exception as error:
            self._error = SaveFailed(f"{type(error).__name__}: {error}", where=self._key)
        if self._error is not None:
            # Whoever still waits, or writes on, must see the error and not hang.
            self._taken.release()
            while self._given.get() is not None:
                self._taken.release()
