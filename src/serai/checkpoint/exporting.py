"""Exporting a generation to what others read: safetensors (one file, or shards with an index), DCP, torch.save.

Safetensors are streamed in bounded memory and need no torch. Everything is written under a temporary
name, read back, and only then gets its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import xxhash

from serai.checkpoint.format import ALIGNMENT, TensorEntry
from serai.checkpoint.stream import TensorStream, open_stream, select, shared_names
from serai.errors import CheckpointError, StorageError, StorageFull
from serai.storage.base import Storage
from serai.storage.keys import TEMPORARY

__all__ = ["ExportFormat", "ExportReport", "export"]

_HEADROOM = 16 << 20


class ExportFormat(StrEnum):
    """What to write."""

    SAFETENSORS = "safetensors"
    DCP = "dcp"
    TORCH = "torch"


@dataclass(frozen=True)
class ExportReport:
    """What ``export`` wrote.

    Attributes:
        files: paths of the new files, in order.
        shared: names of tied tensors that are not stored twice, each with the name it is stored under.
        left_out: what the format cannot hold: values in a module's state dict that are no tensors.
    """

    step: int
    generation: str
    format: str
    target: str
    files: tuple[str, ...]
    tensors: int
    bytes: int
    shared: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def export(
    root: str | Path | Storage,
    target: str | Path,
    *,
    step: int | None = None,
    keys: Iterable[str] | None = None,
    to: ExportFormat | str = ExportFormat.SAFETENSORS,
    max_shard_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write a generation (the newest, or that of ``step``) for others.

    Args:
        target: for safetensors a ``.safetensors`` file or a folder (``model.safetensors``, or with
            ``max_shard_bytes`` ``model-00001-of-0000N.safetensors`` and ``model.safetensors.index.json``,
            as Hugging Face reads them); for DCP a new folder; for torch.save a new file.
        keys: only what is below these dotted names. With one, its prefix goes away: ``["model"]`` gives
            the model's own names.
        progress: called with (bytes done, bytes in all).

    Raises ``CheckpointError`` S433 when the target exists, S434 for tensors the format cannot hold,
    ``StorageFull`` before anything is written when there is no room, ``CheckpointCorrupt`` when the
    checkpoint does not verify.
    """
    stream = open_stream(root, step)
    place = Path(os.path.abspath(Path(target).expanduser()))
    wanted = None if keys is None else list(keys)
    if ExportFormat(to) is ExportFormat.SAFETENSORS:
        return _export_safetensors(stream, place, wanted, max_shard_bytes, progress)
    if max_shard_bytes is not None:
        raise CheckpointError(
            f"a limit for shards means nothing for {to}",
            code="S438",
            expected="safetensors",
            next_step="leave --max-shard-size out",
        )
    from serai.checkpoint.exporting_torch import export_torch

    return export_torch(stream, place, wanted, ExportFormat(to), progress)


# Safetensors


@dataclass(frozen=True)
class _File:
    """One file to write: its name and the tensors in it, by their outside names."""

    name: str
    tensors: dict[str, TensorEntry]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())


def _export_safetensors(
    stream: TensorStream,
    target: Path,
    keys: list[str] | None,
    limit: int | None,
    progress: Callable[[int, int], None] | None,
) -> ExportReport:
    values = stream.values()
    tensors, shared = with_shared(stream, values, keys)
    _refuse_what_does_not_fit(tensors)
    single = target.suffix == ".safetensors"
    if single and limit is not None:
        raise CheckpointError(
            "one file cannot be sharded",
            code="S438",
            where=str(target),
            expected="a folder as the target, or no limit",
            next_step=f"serai ckpt export … {target.with_suffix('')} --max-shard-size …",
        )
    folder = target.parent if single else target
    files = [_File(target.name, tensors)] if single else _shards(tensors, limit)
    names = [file.name for file in files]
    if len(files) > 1:
        names.append("model.safetensors.index.json")
    _refuse_existing(folder, names, single)
    total = sum(file.nbytes for file in files)
    check_room(folder, total)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    with finished_together(folder) as stage:
        for file in files:
            header = _header(file.tensors, shared)
            stage.write(file.name, _bytes_of(stream, header, file.tensors, advance))
        if len(files) > 1:
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: file.name for file in files for name in file.tensors},
            }
            stage.write("model.safetensors.index.json", [json.dumps(index, indent=2).encode() + b"\n"])
    return ExportReport(
        step=stream.manifest.step,
        generation=stream.manifest.name,
        format=ExportFormat.SAFETENSORS.value,
        target=str(target),
        files=tuple(str(folder / name) for name in names),
        tensors=len(tensors),
        bytes=total,
        shared=shared,
        left_out=tuple(_extras(values, keys)),
    )


def with_shared(
    stream: TensorStream, values: bytes, keys: list[str] | None
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The selected tensors, and the names of selected ones that are tied to them.

    A tied tensor whose stored name was not selected is given under the name that was.
    """
    ties = shared_names(values, stream.manifest)
    extra = {path: stream.manifest.tensors[name] for path, name in ties.items()}
    tensors = select(stream.manifest, keys, extra)
    stored: dict[str, str] = {}  # a tensor's own path comes before the extra ones
    shared = {}
    for name, entry in list(tensors.items()):
        first = stored.setdefault(entry.name, name)
        if first != name:
            shared[name] = first
            del tensors[name]
    return tensors, shared


def _shards(tensors: dict[str, TensorEntry], limit: int | None) -> list[_File]:
    groups: list[dict[str, TensorEntry]] = [{}]
    size = 0
    for name, entry in tensors.items():
        if limit is not None and groups[-1] and size + entry.nbytes > limit:
            groups.append({})
            size = 0
        groups[-1][name] = entry
        size += entry.nbytes
    if len(groups) == 1:
        return [_File("model.safetensors", groups[0])]
    return [
        _File(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group)
        for i, group in enumerate(groups, start=1)
    ]


def _header(tensors: dict[str, TensorEntry], shared: dict[str, str]) -> bytes:
    here = {alias: name for alias, name in shared.items() if name in tensors}
    table: dict[str, object] = {"__metadata__": {"format": "pt", **here}}
    position = 0
    for name, entry in tensors.items():
        table[name] = {
            "dtype": entry.dtype.code,
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.nbytes],
        }
        position += entry.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    total = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    return struct.pack("<Q", total - 8) + text.ljust(total - 8, b" ")


def _bytes_of(
    stream: TensorStream, header: bytes, tensors: dict[str, TensorEntry], advance: Callable[[int], None]
) -> Iterator[memoryview | bytes]:
    yield header
    for entry in tensors.values():
        for part in stream.tensor(entry):
            yield part
            advance(len(part))


def _refuse_what_does_not_fit(tensors: dict[str, TensorEntry]) -> None:
    odd = [
        f"{name} ({'quantised' if entry.detail else entry.dtype.name})"
        for name, entry in tensors.items()
        if entry.dtype.opaque or entry.detail
    ]
    if odd:
        raise CheckpointError(
            f"safetensors has no type for {', '.join(odd[:5])}{', …' if len(odd) > 5 else ''}",
            code="S434",
            where=odd[0].split(" ")[0],
            expected="plain float, integer, bool and complex64 tensors",
            next_step="serai ckpt export … --to torch, or choose others with --keys",
        )


def _extras(values: bytes, keys: list[str] | None) -> Iterator[str]:
    """Dotted names of what a module's state dict holds beside tensors."""

    def walk(tree: object, path: str) -> Iterator[str]:
        if not isinstance(tree, dict):
            return
        for key, item in tree.items():
            if key == "$module" and isinstance(item, dict):
                yield from (f"{path}.{name}" for name in item.get("extra") or {})
            elif isinstance(item, dict):
                yield from walk(item, f"{path}.{key}")

    for name, tree in json.loads(values)["values"].items():
        for found in walk(tree.get("same") or (tree.get("ranks") or [None])[0], name):
            if keys is None or any(found.startswith(key + ".") for key in keys):
                yield found


def _refuse_existing(folder: Path, names: list[str], single: bool) -> None:
    there = [name for name in names if (folder / name).exists()]
    if not single and folder.is_dir():
        # Weights under other names would be loaded beside, or instead of, the new ones.
        there += [p.name for p in folder.glob("*.safetensors*") if p.name not in there]
    if folder.exists() and not folder.is_dir():
        there = [folder.name]
    if there:
        raise target_exists(folder / there[0])


# Shared with the other formats


def target_exists(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} exists already, and an export overwrites nothing",
        code="S433",
        where=str(path),
        expected="a name that is free",
        next_step=f"rm -r {path}, or choose another name",
    )


def check_room(folder: Path, nbytes: int) -> None:
    """Raises ``StorageFull`` when the disk that holds ``folder`` has no room for ``nbytes``."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < nbytes + _HEADROOM:
        raise StorageFull(
            f"the export needs {nbytes} bytes, {free} are free",
            where=str(folder),
            expected=f"at least {nbytes + _HEADROOM} free bytes",
            next_step="free some space, or choose another disk",
        )


class Stage:
    """Files written under temporary names, each read back once; ``publish`` names them, the last one last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: list[tuple[Path, Path]] = []

    def write(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        temporary = self.folder / f"{TEMPORARY}{secrets.token_hex(6)}"
        self._written.append((temporary, self.folder / name))
        with translated(temporary):
            digest = xxhash.xxh3_128()
            with open(temporary, "xb") as stream:
                for part in parts:
                    digest.update(part)
                    stream.write(part)
                stream.flush()
                os.fsync(stream.fileno())
            if _digest_of(temporary) != digest.digest():
                raise CheckpointError(
                    f"{name} does not read back as it was written",
                    code="S430",
                    where=str(self.folder / name),
                    next_step="look at the disk, then export again",
                )

    def publish(self) -> None:
        with translated(self.folder):
            for temporary, final in self._written:
                os.rename(temporary, final)
            sync_folder(self.folder)

    def discard(self) -> None:
        for temporary, _ in self._written:
            with contextlib.suppress(OSError):
                temporary.unlink()


@contextlib.contextmanager
def finished_together(folder: Path) -> Iterator[Stage]:
    """A stage in ``folder`` that is published when the block ends well, and leaves nothing otherwise."""
    made = not folder.exists()
    with translated(folder):
        folder.mkdir(parents=True, exist_ok=True)
    stage = Stage(folder)
    try:
        yield stage
        stage.publish()
    except BaseException:
        stage.discard()
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest_of(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while block := stream.read(16 << 20):
            digest.update(block)
    return digest.digest()


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """What the file system says, as the storage errors everybody knows."""
    import errno

    try:
        yield
    except OSError as error:
        kind = StorageFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
        raise kind(f"cannot write {path}: {error.strerror or error}", where=str(path)) from error
