"""Importing what others wrote into a new generation that restores: safetensors, DCP, torch.save, DeepSpeed.

The new generation is one shard and a manifest, written like any other: streamed, checksummed, read back,
committed last. Nothing is unpickled freely.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import serai
from serai.checkpoint.agent.publish import claim_attempt, commit
from serai.checkpoint.catalog import as_storage, check
from serai.checkpoint.format import (
    VALUES,
    DType,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    generation_name,
    pack_header,
    shard_name,
)
from serai.checkpoint.hashing import hex_digest
from serai.checkpoint.history import append_history
from serai.checkpoint.layout import Box
from serai.checkpoint.live import refuse_live_run
from serai.checkpoint.stream import rechunk
from serai.errors import CheckpointCorrupt, CheckpointError, StateMismatch
from serai.storage.base import Storage

__all__ = ["ImportFormat", "ImportReport", "Incoming", "Source", "detect", "import_checkpoint"]

Path_ = tuple[str | int, ...]


class ImportFormat(StrEnum):
    """What a source is."""

    SAFETENSORS = "safetensors"
    DCP = "dcp"
    TORCH = "torch"
    DEEPSPEED = "deepspeed"


@dataclass(frozen=True)
class Incoming:
    """A tensor to store; ``parts`` gives its bytes, C-ordered, when they are wanted."""

    name: str
    path: Path_
    dtype: DType
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[memoryview | bytes]]
    detail: dict[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        return Box.whole(self.shape).count * self.dtype.itemsize


@dataclass
class Source:
    """A foreign checkpoint, opened: its tensors, its trees of plain values, and what to tell about it."""

    tensors: list[Incoming] = field(default_factory=list)
    trees: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ImportReport:
    """What ``import_checkpoint`` made. ``names`` are the top-level names of the state."""

    source: str
    format: str
    root: str
    generation: str
    step: int
    names: tuple[str, ...]
    tensors: int
    bytes: int
    notes: tuple[str, ...] = ()


def import_checkpoint(
    source: str | Path,
    root: str | Path | Storage,
    *,
    step: int = 0,
    kind: ImportFormat | str | None = None,
    name: str = "model",
    rename: Mapping[str, str] | None = None,
    keys: Iterable[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ImportReport:
    """Make a new generation of ``root`` from a foreign checkpoint.

    Args:
        source: a ``.safetensors`` file or a folder of them, a DCP folder, a ``torch.save`` file, or a
            DeepSpeed universal folder; told apart by what is in it unless ``kind`` says.
        step: the step that a run resumes from.
        name: the name in ``state`` for a bare state dict, such as a Hugging Face folder.
        rename: other top-level names for those in the source, ``{"state_dict": "model"}``.
        keys: only these top-level names (after ``rename``).
        progress: called with (bytes written, bytes in all).

    Flat dicts of tensors become modules and dicts with ``state`` and ``param_groups`` optimizers, so that
    they restore into live ones. Raises ``CheckpointError`` S436 for a source that cannot be read, S435 when
    a live run uses the root, ``UnsafeObject`` S437 for what only pickle could carry, S439 when an
    optimizer's parameters cannot be named for certain.
    """
    path = Path(source).expanduser()
    form = ImportFormat(kind) if kind is not None else detect(path)
    storage = as_storage(root)
    refuse_live_run(storage, "an import")
    opened = _open(path, form, name, dict(rename or {}), None if keys is None else set(keys))
    if not opened.trees:
        raise CheckpointError(
            f"{path} holds nothing to import", code="S436", where=str(path), expected="at least one tensor"
        )
    manifest = _write(storage, opened, step, progress)
    return ImportReport(
        source=str(path),
        format=form.value,
        root=storage.url,
        generation=manifest.name,
        step=step,
        names=tuple(opened.trees),
        tensors=len(opened.tensors),
        bytes=manifest.nbytes,
        notes=tuple(opened.notes),
    )


def detect(path: Path) -> ImportFormat:
    """What a path holds, by what lies in it. Raises ``CheckpointError`` S436."""
    if path.is_dir():
        if (path / ".metadata").is_file():
            return ImportFormat.DCP
        if any(path.glob("zero/*/fp32.pt")):
            return ImportFormat.DEEPSPEED
        if any(path.glob("*.safetensors")):
            return ImportFormat.SAFETENSORS
    elif path.is_file():
        return ImportFormat.SAFETENSORS if path.suffix == ".safetensors" else ImportFormat.TORCH
    raise CheckpointError(
        f"{path} is nothing that can be imported" if path.exists() else f"there is no {path}",
        code="S436",
        where=str(path),
        expected="*.safetensors, a DCP folder (.metadata), a torch.save file, or a DeepSpeed universal folder "
        "(zero/*/fp32.pt)",
        next_step="for a ZeRO folder first: python -m deepspeed.checkpoint.ds_to_universal",
    )


def _open(path: Path, form: ImportFormat, name: str, rename: dict[str, str], keys: set[str] | None) -> Source:
    if form is ImportFormat.SAFETENSORS:
        from serai.checkpoint.importing_safetensors import open_safetensors

        opened = open_safetensors(path, rename.get(name, name))
        if keys is not None and rename.get(name, name) not in keys:
            raise unknown_keys(path, keys, [rename.get(name, name)])
        return opened
    from serai.checkpoint.importing_torch import open_dcp, open_deepspeed, open_torch

    opener = {
        ImportFormat.DCP: open_dcp,
        ImportFormat.TORCH: open_torch,
        ImportFormat.DEEPSPEED: open_deepspeed,
    }[form]
    return opener(path, name, rename, keys)


def unknown_keys(path: Path, wanted: Iterable[str], have: Iterable[str]) -> StateMismatch:
    return StateMismatch(
        f"{path} has nothing called {', '.join(sorted(wanted))}",
        where=str(path),
        expected="one of: " + ", ".join(have),
    )


def _write(
    storage: Storage, source: Source, step: int, progress: Callable[[int, int], None] | None
) -> Manifest:
    began = time.monotonic()
    tensors = sorted(source.tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header = pack_header((t.name, t.dtype, t.shape, t.nbytes) for t in tensors)
    total = len(header) + sum(tensor.nbytes for tensor in tensors)
    attempt = claim_attempt(storage, uuid.uuid4().hex)
    folder = generation_name(step, attempt, 0)
    file = shard_name(0, 1)
    chunks: list[str] = []

    def hashed() -> Iterator[memoryview]:
        done = 0
        for chunk in rechunk(_bytes_of(header, tensors)):
            chunks.append(hex_digest(chunk))
            yield chunk
            done += len(chunk)
            if progress is not None:
                progress(done, total)

    try:
        storage.upload(f"{folder}/{file}", hashed(), total)
        manifest, values = _manifest(source, tensors, len(header), total, tuple(chunks), step, attempt)
        storage.put(f"{folder}/{VALUES}", values)
        damage = check(storage, folder, manifest)
        if damage:
            raise CheckpointError(
                f"the import does not read back as it was written: {damage[0]}",
                code="S430",
                where=storage.url_of(folder),
                expected="the bytes that were sent",
                next_step="look at the disk, then import again",
            )
        commit(storage, manifest, values)
    except BaseException:
        # Never a checkpoint: the manifest was not there yet.
        storage.delete_folder(f"{folder}/")
        raise
    append_history(storage, "committed", step, folder, manifest.nbytes, time.monotonic() - began)
    return manifest


def _bytes_of(header: bytes, tensors: list[Incoming]) -> Iterator[memoryview | bytes]:
    yield header
    for tensor in tensors:
        left = tensor.nbytes
        for part in tensor.parts():
            left -= len(part)
            yield part
        if left:
            raise CheckpointCorrupt(
                f"{tensor.name} has {tensor.nbytes - left} bytes, its shape wants {tensor.nbytes}",
                code="S436",
                where=tensor.name,
            )


def _manifest(
    source: Source,
    tensors: list[Incoming],
    start: int,
    total: int,
    chunks: tuple[str, ...],
    step: int,
    attempt: int,
) -> tuple[Manifest, bytes]:
    entries = {}
    for tensor in tensors:
        piece = Piece(0, start, Box.whole(tensor.shape))
        entries[tensor.name] = TensorEntry(
            tensor.name, tensor.path, tensor.dtype, tensor.shape, (piece,), None, tensor.detail
        )
        start += tensor.nbytes
    document = {"schema_version": 1, "values": {name: {"same": tree} for name, tree in source.trees.items()}}
    values = json.dumps(document, separators=(",", ":")).encode()
    manifest = Manifest(
        run="",
        step=step,
        attempt=attempt,
        sequence=0,
        created=time.time(),
        world_size=1,
        files=(FileEntry(shard_name(0, 1), total, chunks),),
        tensors=entries,
        values_size=len(values),
        values_digest=hex_digest(values),
        software={"serai": serai.__version__},
    )
    return manifest, values
