"""What serai asks of a place that keeps bytes. One class a kind of storage, in its own file."""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from serai.errors import StorageError

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
    def upload(self, key: str, chunks: Iterable[memoryview], size: int, *, stable: bool = False) -> None:
        """Store a large object from consecutive chunks (``size`` bytes in all), atomically and durably.

        A chunk's memory may change once the next chunk is asked for, unless ``stable`` says that all of
        them stay as they are until this returns: then the next chunk is made while the one before is
        written, and nothing is copied on the way. Chunks of whole 4 KiB blocks in 4 KiB aligned memory,
        16 MiB or more each, are the fast path of a local disk.
        """

    @abstractmethod
    def copy(self, key: str, new_key: str) -> None:
        """Store the object ``key`` under ``new_key`` too, replacing what is there.

        No byte passes through this process where the place can do it: a hard link on a disk, a
        server-side copy in an object store.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose key starts with ``prefix``, at any depth, in no particular order."""

    @abstractmethod
    def list_folders(self, prefix: str = "") -> builtins.list[str]:
        """Names of the immediate folders below ``prefix`` (which is ``""`` or ends with ``/``)."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove one object; a missing one is no error."""

    @abstractmethod
    def delete_folder(self, prefix: str) -> None:
        """Remove everything below ``prefix`` (which ends with ``/``); a missing one is no error."""

    @abstractmethod
    def probe_conditional_put(self) -> bool:
        """Whether this place really honours ``put_if_absent``: tried with a small object, then removed."""

    def url_of(self, key: str) -> str:
        """A URL for one object or folder, for people; options in ``url`` stay behind the path."""
        root, found, query = self.url.partition("?")
        return f"{root.rstrip('/')}/{key}{found}{query}"

    def verify_size(self, key: str, size: int) -> None:
        """Ask the place how large ``key`` is; a ``StorageError`` when that is not ``size`` bytes."""
        stored = self.size(key)
        if stored != size:
            raise StorageError(
                f"{key} has {stored} bytes where {size} were written",
                code="S307",
                where=self.url_of(key),
                expected=f"{size} bytes",
                next_step="serai explain S307",
            )

    def checksum(self, key: str, *, block: int = 16 << 20) -> str:
        """XXH3-128 of the whole object in hex, read back in blocks of ``block`` bytes."""
        import xxhash

        size = self.size(key)
        digest = xxhash.xxh3_128()
        buffer = bytearray(min(block, size))
        for offset in range(0, size, block):
            view = memoryview(buffer)[: size - offset]
            self.read_into(key, offset, view)
            digest.update(view)
        return digest.hexdigest()

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The whole object, as one writer left it, even while another replaces it."""
