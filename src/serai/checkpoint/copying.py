"""Copying committed generations from one storage to another, verified on both ends.

Safe to repeat: what is there and verifies is left alone, so an interrupted copy goes on where it was.
The manifest goes last, so a half-copied generation is no checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from serai.checkpoint.agent.publish import claimed_attempts
from serai.checkpoint.catalog import as_storage, check, find, scan
from serai.checkpoint.format import MANIFEST, VALUES, FileEntry, Manifest
from serai.checkpoint.hashing import chunk_spans, hex_digest
from serai.checkpoint.live import refuse_live_run
from serai.checkpoint.stream import TensorStream
from serai.errors import CheckpointError, CheckpointNotFound, NotFoundInStorage, StorageError
from serai.storage.base import Storage

__all__ = ["Copied", "CopyReport", "copy"]


@dataclass(frozen=True)
class Copied:
    """One generation: ``bytes`` were sent now, ``present`` had been there and verified already."""

    name: str
    step: int
    bytes: int
    present: int

    @property
    def already_there(self) -> bool:
        return self.bytes == 0


@dataclass(frozen=True)
class CopyReport:
    """What ``copy`` did. ``newest`` is the step that a restore from the target would now take."""

    source: str
    target: str
    generations: tuple[Copied, ...] = field(default=())
    newest: int | None = None

    @property
    def bytes(self) -> int:
        return sum(copied.bytes for copied in self.generations)


def copy(
    source: str | Path | Storage,
    target: str | Path | Storage,
    *,
    step: int | None = None,
    every: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> CopyReport:
    """Copy the newest generation (that of ``step``, or with ``every`` all of them, oldest first).

    Each chunk is compared with its checksum when it is read, and read back from the target and compared
    again before the manifest is written there. Pins are not copied.

    Raises ``CheckpointCorrupt`` when the source does not verify, ``CheckpointNotFound`` when there is
    nothing, ``CheckpointError`` S430 when the target does not read back as written, S431 when it has
    another generation of that name, S435 when a live run of an earlier attempt saves to it.
    """
    origin, place = as_storage(source), as_storage(target)
    if origin.url == place.url:
        raise CheckpointError(
            "source and target of the copy are one place",
            code="S432",
            where=place.url,
            expected="two different roots",
        )
    chosen = _chosen(origin, step, every)
    if max(manifest.attempt for _, manifest in chosen) > max(claimed_attempts(place), default=0):
        refuse_live_run(place, "a copy of a later attempt")
    total = sum(manifest.nbytes for _, manifest in chosen)
    meter = _Meter(total, progress)
    copied = []
    for folder, manifest in chosen:
        copied.append(_copy_one(TensorStream(origin, folder, manifest), place, meter))
        _mark_attempt(place, manifest)
    newest = max(
        (entry for _, entry in scan(place) if isinstance(entry, Manifest)),
        key=lambda manifest: manifest.key,
        default=None,
    )
    return CopyReport(origin.url, place.url, tuple(copied), newest.step if newest else None)


class _Meter:
    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self.total = total
        self.done = 0
        self._progress = progress

    def advance(self, count: int) -> None:
        self.done += count
        if self._progress is not None:
            self._progress(self.done, self.total)


def _chosen(origin: Storage, step: int | None, every: bool) -> list[tuple[str, Manifest]]:
    if not every:
        _, folder, manifest = find(origin, step)
        return [(folder, manifest)]
    found = [(folder, entry) for folder, entry in scan(origin) if isinstance(entry, Manifest)]
    if not found:
        raise CheckpointNotFound(
            f"there is no checkpoint in {origin.url}",
            where=origin.url,
            next_step=f"serai ckpt ls {origin.url}",
        )
    return sorted(found, key=lambda pair: pair[1].key)


def _copy_one(stream: TensorStream, place: Storage, meter: _Meter) -> Copied:
    manifest = stream.manifest
    # The manifest's own bytes travel, not a rewritten form: keys that this serai does not know stay.
    data = stream.storage.read(f"{stream.folder}/{MANIFEST}")
    folder = manifest.name
    key = f"{folder}/{MANIFEST}"
    there = _read(place, key)
    if there is not None and there != data:
        raise CheckpointError(
            f"{place.url} has another {folder} already",
            code="S431",
            where=place.url_of(key),
            expected="a root without it, or with the same one",
            next_step="copy to an empty root",
        )
    sent = present = 0
    for number, file in enumerate(manifest.files):
        if _has_file(place, folder, file):
            present += file.size
        else:
            place.upload(f"{folder}/{file.name}", _chunks(stream, number, file), file.size)
            sent += file.size
        meter.advance(file.size)
    values = stream.values()
    if _read(place, f"{folder}/{VALUES}") == values:
        present += len(values)
    else:
        place.put(f"{folder}/{VALUES}", values)
        sent += len(values)
    meter.advance(len(values))
    if sent:
        damage = check(place, folder, manifest)
        if damage:
            raise CheckpointError(
                f"the copy does not read back as it was written: {damage[0]}",
                code="S430",
                where=place.url_of(folder),
                expected="the bytes that were sent",
                next_step="copy again; if it stays, look at the target's disk or network",
            )
    if there is None and not place.put_if_absent(key, data) and place.read(key) != data:
        raise CheckpointError(
            f"somebody else wrote another {folder} meanwhile", code="S431", where=place.url_of(key)
        )
    return Copied(folder, manifest.step, sent + (len(data) if there is None else 0), present)


def _chunks(stream: TensorStream, number: int, file: FileEntry) -> Iterator[memoryview]:
    for index in range(len(file.chunks)):
        yield memoryview(stream.chunk(number, index))


def _has_file(place: Storage, folder: str, file: FileEntry) -> bool:
    """Whether an earlier, interrupted copy brought this file over whole."""
    key = f"{folder}/{file.name}"
    try:
        if place.size(key) != file.size:
            return False
        for index, (offset, length) in enumerate(chunk_spans(file.size, file.chunk_bytes)):
            data = bytearray(length)
            place.read_into(key, offset, memoryview(data))
            if hex_digest(data) != file.chunks[index]:
                return False
    except StorageError:
        return False
    return True


def _read(place: Storage, key: str) -> bytes | None:
    try:
        return place.read(key)
    except NotFoundInStorage:
        return None


def _mark_attempt(place: Storage, manifest: Manifest) -> None:
    """A run that starts in the target must come after what was copied there, never before it."""
    if max(claimed_attempts(place), default=0) < manifest.attempt:
        note = {"copied": manifest.name, "time": time.time()}
        place.put_if_absent(f"attempts/{manifest.attempt:06d}", json.dumps(note).encode())
