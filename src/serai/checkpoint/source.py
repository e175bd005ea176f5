"""Where a generation is read from, and the two passes over it: verify everything, then fill.

A chunk is the unit: it is read whole, hashed, and only then are parts of it copied. From memory nothing
is read twice; from storage the second pass hashes again, since a disk may answer differently.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from serai.checkpoint.catalog import tensors_in
from serai.checkpoint.format import VALUES, Manifest
from serai.checkpoint.hashing import hex_digest
from serai.checkpoint.memory import Mapping, available_bytes
from serai.errors import CheckpointCorrupt, StorageError
from serai.storage.base import Storage
from serai.storage.local import LocalStorage

__all__ = ["Copy", "MemorySource", "Source", "StorageSource", "fill", "verify_chunks"]


@dataclass(frozen=True)
class Copy:
    """``nbytes`` from byte ``start`` of file number ``file`` to an address in this process."""

    file: int
    start: int
    nbytes: int
    address: int


class Source(ABC):
    """One generation, readable."""

    tier: str
    manifest: Manifest
    values: bytes
    # Sealed memory of the agent cannot change between the two passes; anything else might.
    stable = False

    @abstractmethod
    @contextlib.contextmanager
    def chunk(self, file: int, offset: int, length: int) -> Iterator[memoryview]:
        """The bytes of a chunk, valid inside the context."""

    @abstractmethod
    def close(self) -> None:
        """Give back what reading needed."""

    def check_values(self) -> None:
        if (
            len(self.values) != self.manifest.values_size
            or hex_digest(self.values) != self.manifest.values_digest
        ):
            raise CheckpointCorrupt(
                f"{VALUES} of {self.manifest.name} does not verify: its checksum does not match its bytes",
                where=f"{self.manifest.name}/{VALUES}",
            )


class StorageSource(Source):
    """A committed generation in a storage."""

    def __init__(self, storage: Storage, folder: str, manifest: Manifest, tier: str) -> None:
        self.tier = tier
        self.manifest = manifest
        self._storage = storage
        self._folder = folder
        self._buffers = threading.local()
        # What crossed a network is kept for the second pass where memory allows; a local disk is read twice,
        # which is no slower than touching new memory.
        far = not isinstance(storage, LocalStorage)
        self._room = available_bytes()[0] // 2 if far else 0
        self._kept: dict[tuple[int, int], bytearray] = {}
        # Before anything is allocated by the manifest's word: the files have to be as large as it says.
        self._check_size(VALUES, manifest.values_size)
        for file in manifest.files:
            self._check_size(file.name, file.size)
        self.values = storage.read(f"{folder}/{VALUES}")
        self.check_values()

    def _check_size(self, name: str, size: int) -> None:
        key = f"{self._folder}/{name}"
        stored = self._storage.size(key)
        if stored < size:
            raise CheckpointCorrupt(
                f"{key} is cut short: it has {stored} bytes, {size} were written",
                where=self._storage.url_of(key),
            )

    @contextlib.contextmanager
    def chunk(self, file: int, offset: int, length: int) -> Iterator[memoryview]:
        kept = self._kept.get((file, offset))
        if kept is not None:
            yield memoryview(kept)
            return
        if length <= self._room:
            self._room -= length
            own = bytearray(length)
            self._read(file, offset, memoryview(own))
            self._kept[(file, offset)] = own
            yield memoryview(own)
            return
        buffer = getattr(self._buffers, "data", None)
        if buffer is None or len(buffer) < length:
            # Aligned to pages, so that a local disk can be read past the page cache.
            buffer = self._buffers.data = mmap.mmap(-1, -(-length // mmap.PAGESIZE) * mmap.PAGESIZE)
        view = memoryview(buffer)[:length]
        self._read(file, offset, view)
        yield view

    def _read(self, file: int, offset: int, view: memoryview) -> None:
        self._storage.read_into(f"{self._folder}/{self.manifest.files[file].name}", offset, view)

    def close(self) -> None:
        self._buffers = threading.local()
        self._kept.clear()


class MemorySource(Source):
    """A generation in the agent's slots, mapped read-only."""

    tier = "memory"
    stable = True

    def __init__(
        self, manifest: Manifest, values: bytes, slots: Sequence[Mapping], places: Sequence[tuple[int, int]]
    ) -> None:
        # For each file of the manifest: the number of its slot and where it begins there.
        self._places = list(places)
        self.manifest = manifest
        self.values = values
        self._slots = list(slots)
        self.check_values()

    @contextlib.contextmanager
    def chunk(self, file: int, offset: int, length: int) -> Iterator[memoryview]:
        slot, start = self._places[file]
        yield self._slots[slot].memory[start + offset : start + offset + length]

    def close(self) -> None:
        for slot in self._slots:
            slot.close()


Job = tuple[int, int, int, int]  # file, chunk number, offset, length


def _jobs(source: Source, copies: Sequence[Copy]) -> dict[Job, list[Copy]]:
    """The chunks that the copies touch, each with the parts of them that it holds."""
    jobs: dict[Job, list[Copy]] = {}
    for copy in copies:
        entry = source.manifest.files[copy.file]
        start, left, address = copy.start, copy.nbytes, copy.address
        while left:
            number = start // entry.chunk_bytes
            base = number * entry.chunk_bytes
            length = min(entry.chunk_bytes, entry.size - base)
            part = min(left, base + length - start)
            jobs.setdefault((copy.file, number, base, length), []).append(
                Copy(copy.file, start, part, address)
            )
            start, left, address = start + part, left - part, address + part
    return dict(sorted(jobs.items(), key=lambda item: item[0]))


def verify_chunks(source: Source, copies: Sequence[Copy], pool: ThreadPoolExecutor) -> int:
    """Read and hash every chunk that will be used; how many bytes that were. Raises ``CheckpointCorrupt``."""
    jobs = list(_jobs(source, copies))
    for _ in pool.map(lambda job: _run(source, job, (), check=True), jobs):
        pass
    return sum(job[3] for job in jobs)


def fill(source: Source, copies: Sequence[Copy], pool: ThreadPoolExecutor) -> None:
    """Copy everything to its address. What is not stable is hashed again first."""
    jobs = _jobs(source, copies)
    check = not source.stable
    for _ in pool.map(lambda item: _run(source, item[0], item[1], check=check), jobs.items()):
        pass


def _run(source: Source, job: Job, copies: Sequence[Copy], *, check: bool) -> None:
    file, number, base, length = job
    entry = source.manifest.files[file]
    place = f"{source.manifest.name}/{entry.name}"
    try:
        with source.chunk(file, base, length) as view:
            if check and hex_digest(view) != entry.chunks[number]:
                names = tensors_in(source.manifest, file, base, base + length)
                raise CheckpointCorrupt(
                    f"{place} does not verify: the checksum of bytes {base} to {base + length} does not match "
                    f"(they hold {', '.join(names[:4])}{', …' if len(names) > 4 else ''})",
                    where=f"{place}@{base}",
                    next_step="serai ckpt verify",
                )
            if copies:
                _move(view, base, copies)
    except StorageError as error:
        raise CheckpointCorrupt(
            f"{place} cannot be read: {error.message}", where=f"{place}@{base}"
        ) from error


def _move(view: memoryview, base: int, copies: Sequence[Copy]) -> None:
    import numpy as np

    address = int(np.frombuffer(view, dtype=np.uint8).ctypes.data) if len(view) else 0
    for copy in copies:
        ctypes.memmove(copy.address, address + copy.start - base, copy.nbytes)
