"""What a root holds: its generations, newest first, and whether their bytes are what was written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serai.checkpoint.format import MANIFEST, MAX_MANIFEST_BYTES, VALUES, FileEntry, Manifest
from serai.checkpoint.hashing import chunk_spans, hex_digest
from serai.errors import CheckpointCorrupt, CheckpointNotFound, NotFoundInStorage, StorageError
from serai.storage.base import Storage
from serai.storage.registry import open_storage

__all__ = [
    "Damage",
    "Generation",
    "GenerationReport",
    "VerifyReport",
    "find",
    "generations",
    "is_pinned",
    "read_manifest",
    "scan",
    "verify",
]

PIN = "pinned"
LATEST = "latest.json"


@dataclass(frozen=True)
class Generation:
    """One committed checkpoint, as its manifest describes it.

    Attributes:
        step: the step given to ``save``.
        name: its folder below the root.
        attempt, sequence: order generations; the highest pair is the newest.
        created: unix seconds.
        bytes: size of all its files but the manifest.
        world: ranks that saved it.
    """

    step: int
    name: str
    attempt: int
    sequence: int
    created: float
    bytes: int
    world: int
    metrics: dict[str, float]
    url: str
    tensors: int
    run: str

    @property
    def key(self) -> tuple[int, int]:
        return (self.attempt, self.sequence)

    @staticmethod
    def of(manifest: Manifest, storage: Storage, folder: str) -> Generation:
        return Generation(
            step=manifest.step,
            name=folder,
            attempt=manifest.attempt,
            sequence=manifest.sequence,
            created=manifest.created,
            bytes=manifest.nbytes,
            world=manifest.world_size,
            metrics=dict(manifest.metrics),
            url=storage.url_of(folder),
            tensors=len(manifest.tensors),
            run=manifest.run,
        )


@dataclass(frozen=True)
class Damage:
    """Something that does not verify: where it is (folder, file, offset, tensors) and why."""

    generation: str
    reason: str
    file: str | None = None
    offset: int | None = None
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f"{self.generation}/{self.file}" if self.file else self.generation
        at = f"@{self.offset}" if self.offset is not None else ""
        names = (
            f" (holds {', '.join(self.tensors[:4])}{', …' if len(self.tensors) > 4 else ''})"
            if self.tensors
            else ""
        )
        return f"{place}{at}: {self.reason}{names}"


@dataclass(frozen=True)
class GenerationReport:
    """``verify`` on one generation."""

    name: str
    step: int | None
    bytes: int
    damage: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        return not self.damage


@dataclass(frozen=True)
class VerifyReport:
    """``verify`` on a root. ``ok`` when there is at least one generation and every one verifies."""

    root: str
    generations: tuple[GenerationReport, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return bool(self.generations) and all(g.ok for g in self.generations)

    @property
    def damage(self) -> list[Damage]:
        return [damage for g in self.generations for damage in g.damage]


def as_storage(root: str | Path | Storage) -> Storage:
    return root if isinstance(root, Storage) else open_storage(root)


def scan(root: str | Path | Storage) -> Iterator[tuple[str, Manifest | Damage]]:
    """Every folder with a manifest: the manifest where it verifies, else the damage."""
    storage = as_storage(root)
    for folder in storage.list_folders(""):
        try:
            yield folder, read_manifest(storage, folder)
        except NotFoundInStorage:
            continue
        except (CheckpointCorrupt, StorageError) as error:
            yield folder, Damage(folder, error.message, MANIFEST)


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Raises ``NotFoundInStorage`` if there is none, ``CheckpointCorrupt`` if it does not verify."""
    key = f"{folder}/{MANIFEST}"
    size = storage.size(key)
    if size > MAX_MANIFEST_BYTES:
        raise CheckpointCorrupt(f"the manifest has {size} bytes", where=storage.url_of(key))
    return Manifest.from_bytes(storage.read(key), storage.url_of(key))


def lost_manifest(storage: Storage, key: tuple[int, int]) -> Damage | None:
    """The generation that ``latest.json`` names, if it is newer than ``key`` and has lost its manifest.

    Such a folder is no checkpoint and is never loaded; whoever gets an older one should know.
    """
    try:
        hint = json.loads(storage.read(LATEST))
        name, newest = str(hint["name"]), (int(hint["attempt"]), int(hint["sequence"]))
        if newest <= key or name not in storage.list_folders(""):
            return None
    except (StorageError, ValueError, KeyError, TypeError):
        return None  # only a hint
    try:
        storage.size(f"{name}/{MANIFEST}")
    except NotFoundInStorage:
        return Damage(name, f"{LATEST} names it, and it is gone", MANIFEST)
    except StorageError:
        return None
    return None


def generations(root: str | Path | Storage) -> list[Generation]:
    """The committed generations whose manifests verify, newest first. A missing root has none."""
    storage = as_storage(root)
    found = [
        Generation.of(entry, storage, folder)
        for folder, entry in scan(storage)
        if isinstance(entry, Manifest)
    ]
    return sorted(found, key=lambda g: g.key, reverse=True)


def find(root: str | Path | Storage, step: int | None) -> tuple[Storage, str, Manifest]:
    """The newest generation, or the newest of ``step``. Raises ``CheckpointNotFound``."""
    storage = as_storage(root)
    found: list[tuple[str, Manifest]] = []
    damaged: list[Damage] = []
    for folder, entry in scan(storage):
        if isinstance(entry, Manifest):
            found.append((folder, entry))
        else:
            damaged.append(entry)
    matching = [pair for pair in found if step is None or pair[1].step == step]
    if not matching:
        have = ", ".join(str(s) for s in sorted({m.step for _, m in found})[-10:]) or "none"
        raise CheckpointNotFound(
            f"there is no {'checkpoint' if step is None else f'checkpoint of step {step}'} in {storage.url}"
            + "".join(f"; damaged: {damage}" for damage in damaged[:3]),
            where=storage.url,
            expected=f"one of the steps that are there: {have}",
            next_step=f"serai ckpt ls {storage.url}",
        )
    folder, manifest = max(matching, key=lambda pair: pair[1].key)
    return storage, folder, manifest


def is_pinned(storage: Storage, generation: Generation) -> bool:
    try:
        storage.size(f"{generation.name}/{PIN}")
    except NotFoundInStorage:
        return False
    return True


def verify(
    root: str | Path | Storage, *, step: int | None = None, progress: Any = None, threads: int = 2
) -> VerifyReport:
    """Read every byte of every generation (or of those of ``step``) and compare it with its checksum.

    ``progress(done_bytes, total_bytes)`` is called as it goes. Damage is reported, never raised.
    """
    storage = as_storage(root)
    reports = []
    entries = [
        (f, e) for f, e in scan(storage) if step is None or not isinstance(e, Manifest) or e.step == step
    ]
    total = sum(e.nbytes for _, e in entries if isinstance(e, Manifest))
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    for folder, entry in sorted(entries, key=lambda pair: pair[0], reverse=True):
        if isinstance(entry, Damage):
            reports.append(GenerationReport(folder, None, 0, (entry,)))
        else:
            damage = tuple(check(storage, folder, entry, advance=advance, threads=threads))
            reports.append(GenerationReport(folder, entry.step, entry.nbytes, damage))
    return VerifyReport(storage.url, tuple(reports))


def check(
    storage: Storage, folder: str, manifest: Manifest, *, advance: Any = None, threads: int = 2
) -> list[Damage]:
    """Everything of one generation that does not verify."""
    found: list[Damage] = []
    try:
        values = storage.read(f"{folder}/{VALUES}")
        if len(values) != manifest.values_size or hex_digest(values) != manifest.values_digest:
            found.append(Damage(folder, "its checksum does not match its bytes", VALUES))
    except StorageError as error:
        found.append(Damage(folder, error.message, VALUES))
    for number, file in enumerate(manifest.files):
        found.extend(_check_file(storage, folder, manifest, number, file, advance, threads))
    return found


def _check_file(
    storage: Storage,
    folder: str,
    manifest: Manifest,
    number: int,
    file: FileEntry,
    advance: Any,
    threads: int,
) -> list[Damage]:
    key = f"{folder}/{file.name}"
    try:
        size = storage.size(key)
    except StorageError as error:
        return [Damage(folder, error.message, file.name, None, tensors_in(manifest, number, 0, file.size))]
    if size != file.size:
        names = tensors_in(manifest, number, min(size, file.size), file.size)
        return [Damage(folder, f"it has {size} bytes, {file.size} were written", file.name, None, names)]

    def one(item: tuple[int, tuple[int, int]]) -> Damage | None:
        index, (offset, length) = item
        data = bytearray(length)
        try:
            storage.read_into(key, offset, memoryview(data))
        except StorageError as error:
            return Damage(folder, error.message, file.name, offset)
        if hex_digest(data) != file.chunks[index]:
            names = tensors_in(manifest, number, offset, offset + length)
            return Damage(folder, "its checksum does not match its bytes", file.name, offset, names)
        if advance is not None:
            advance(length)
        return None

    spans = list(enumerate(chunk_spans(file.size, file.chunk_bytes)))
    with ThreadPoolExecutor(threads) as pool:
        return [damage for damage in pool.map(one, spans) if damage is not None]


def tensors_in(manifest: Manifest, file: int, start: int, stop: int) -> tuple[str, ...]:
    """Names of the tensors with bytes in that range of a file."""
    return tuple(
        tensor.name
        for tensor in manifest.tensors.values()
        if any(
            piece.file == file
            and piece.start < stop
            and piece.start + piece.box.count * tensor.dtype.itemsize > start
            for piece in tensor.pieces
        )
    )
