"""What serai asks of a place that keeps bytes. One class a kind of storage, in its own file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Entry", "Storage"]


@dataclass(frozen=True)
class Entry:
    """One stored object: its key (relative to the root, ``/``-separated) and size in bytes."""

    key: str
    size: int


class Storage(ABC):
    """A root under which keys name byte strings. Keys are relative, ``/``-separated, never ``..``.

    Every method is safe to call from several threads. Errors are the ``StorageError`` family; a
    ``StorageTransient`` has already been retried with backoff when it reaches the caller.
    """

    url: str

    @abstractmethod
    def size(self, key: str) -> int:
        """Bytes stored under ``key``; raises ``NotFoundInStorage``."""

    @abstractmethod
    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; a short object is a ``StorageError``, never a short read."""

    @abstractmethod
    def put(self, key: str, data: bytes | memoryview) -> None:
        """Store atomically and durably: after return the whole object survives a power cut."""

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Store only if ``key`` does not exist, atomically among all writers; ``False`` if it did."""

    @abstractmethod
    def upload(self, key: str, chunks: Iterable[memoryview], size: int) -> None:
        """Store a large object from consecutive chunks (``size`` bytes in all), atomically and durably."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with ``prefix``, at any depth, in no particular order."""

    @abstractmethod
    def list_folders(self, prefix: str = "") -> list[str]:
        """Names of the immediate folders below ``prefix`` (which is ``""`` or ends with ``/``)."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove one object; a missing one is no error."""

    @abstractmethod
    def delete_folder(self, prefix: str) -> None:
        """Remove everything below ``prefix`` (which ends with ``/``); a missing one is no error."""

    def read(self, key: str) -> bytes:
        """The whole object."""
        data = bytearray(self.size(key))
        self.read_into(key, 0, memoryview(data))
        return bytes(data)
