"""Reading a generation piece by piece, verified, in bounded memory and without torch.

``TensorStream`` gives the bytes of whole tensors in C order, whatever boxes they were saved in. A chunk
is read whole, compared with its checksum, and only then is any byte of it handed on.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from serai.checkpoint.catalog import as_storage, find, tensors_in
from serai.checkpoint.format import VALUES, Manifest, Piece, TensorEntry
from serai.checkpoint.hashing import CHUNK_BYTES, hex_digest
from serai.checkpoint.layout import Box
from serai.errors import CheckpointCorrupt, StateMismatch, StorageError
from serai.storage.base import Storage

__all__ = ["BLOCK_BYTES", "TensorStream", "dotted", "open_stream", "rechunk", "select", "shared_names"]

BLOCK_BYTES = 16 << 20
_KEPT_CHUNKS = 3


class TensorStream:
    """One committed generation, read chunk by chunk.

    Args:
        storage, folder, manifest: as ``catalog.find`` returns them.

    ``bytes_read`` counts what was read from the storage. Every method raises ``CheckpointCorrupt``, with
    file, offset and tensors, for bytes that do not verify or cannot be read.
    """

    def __init__(self, storage: Storage, folder: str, manifest: Manifest) -> None:
        self.storage = storage
        self.folder = folder
        self.manifest = manifest
        self.bytes_read = 0
        self._chunks: OrderedDict[tuple[int, int], bytes] = OrderedDict()

    def values(self) -> bytes:
        """``values.json``, verified."""
        place = f"{self.folder}/{VALUES}"
        try:
            data = self.storage.read(place)
        except StorageError as error:
            raise CheckpointCorrupt(f"{place} cannot be read: {error.message}", where=place) from error
        if len(data) != self.manifest.values_size or hex_digest(data) != self.manifest.values_digest:
            raise CheckpointCorrupt(
                f"{place} does not verify: its checksum does not match its bytes",
                where=place,
                next_step=f"serai ckpt verify {self.storage.url}",
            )
        return data

    def chunk(self, file: int, number: int) -> bytes:
        """Chunk ``number`` of a file; the newest few are remembered, since tensors share chunks."""
        known = self._chunks.get((file, number))
        if known is not None:
            self._chunks.move_to_end((file, number))
            return known
        entry = self.manifest.files[file]
        offset = number * entry.chunk_bytes
        data = bytearray(min(entry.chunk_bytes, entry.size - offset))
        place = f"{self.folder}/{entry.name}"
        try:
            self.storage.read_into(place, offset, memoryview(data))
        except StorageError as error:
            raise self._corrupt(file, offset, len(data), f"cannot be read: {error.message}") from error
        if hex_digest(data) != entry.chunks[number]:
            raise self._corrupt(file, offset, len(data), "does not verify: its checksum differs")
        self.bytes_read += len(data)
        self._chunks[(file, number)] = result = bytes(data)
        while len(self._chunks) > _KEPT_CHUNKS:
            self._chunks.popitem(last=False)
        return result

    def read(self, file: int, start: int, length: int) -> Iterator[memoryview]:
        """``length`` verified bytes from ``start`` of a file, in parts no larger than a chunk."""
        size = self.manifest.files[file].chunk_bytes
        while length > 0:
            number, at = divmod(start, size)
            part = memoryview(self.chunk(file, number))[at : at + length]
            yield part
            start += len(part)
            length -= len(part)

    def tensor(self, entry: TensorEntry) -> Iterator[memoryview]:
        """The bytes of a whole tensor, C-ordered, little-endian, in parts."""
        if not entry.nbytes:
            return
        pieces = sorted(entry.pieces, key=lambda piece: piece.box)
        if all(_whole_rows(piece.box, entry.shape) for piece in pieces):
            for piece in pieces:
                yield from self.read(piece.file, piece.start, piece.box.count * entry.dtype.itemsize)
            return
        row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        rows = max(1, BLOCK_BYTES // max(1, row))
        whole = Box.whole(entry.shape)
        for start in range(0, entry.shape[0], rows):
            slab = whole.rows(start, min(entry.shape[0], start + rows))
            yield self._assemble(entry, pieces, slab).reshape(-1).data

    def array(self, entry: TensorEntry) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A whole tensor as bytes, ``[nbytes] uint8``."""
        data = np.empty(entry.nbytes, dtype=np.uint8)
        position = 0
        for part in self.tensor(entry):
            data[position : position + len(part)] = np.frombuffer(part, dtype=np.uint8)
            position += len(part)
        return data

    def _assemble(
        self, entry: TensorEntry, pieces: list[Piece], slab: Box
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Some rows of a tensor that was cut along other dimensions as well."""
        size = entry.dtype.itemsize
        block = np.empty((*slab.lengths, size), dtype=np.uint8)
        for piece in pieces:
            common = piece.box.intersect(slab)
            if common is None:
                continue
            # Whole rows of the piece lie end to end in its file.
            first = common.offsets[0] - piece.box.offsets[0]
            row = math.prod(piece.box.lengths[1:]) * size
            held = piece.box.rows(first, first + common.lengths[0])
            parts = self.read(piece.file, piece.start + first * row, common.lengths[0] * row)
            source = np.frombuffer(b"".join(parts), dtype=np.uint8).reshape((*held.lengths, size))
            block[common.within(slab)] = source[common.within(held)]
        return block

    def _corrupt(self, file: int, offset: int, length: int, problem: str) -> CheckpointCorrupt:
        place = f"{self.folder}/{self.manifest.files[file].name}"
        names = tensors_in(self.manifest, file, offset, offset + length)
        shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        return CheckpointCorrupt(
            f"{place} {problem} (bytes {offset} to {offset + length}, which hold {shown or 'no tensor'})",
            where=f"{self.storage.url_of(place)}@{offset}",
            expected="the bytes that were saved",
            next_step=f"serai ckpt verify {self.storage.url}",
        )


def _whole_rows(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box is cut along its first dimension only, so that its bytes follow one another."""
    return box.lengths[1:] == tuple(shape[1:])


def open_stream(root: str | Path | Storage, step: int | None) -> TensorStream:
    """The newest generation, or the newest of ``step``. Raises ``CheckpointNotFound``."""
    storage, folder, manifest = find(as_storage(root), step)
    return TensorStream(storage, folder, manifest)


def dotted(path: Iterable[Any]) -> str:
    return ".".join(str(key) for key in path)


def select(
    manifest: Manifest,
    keys: Iterable[str] | None,
    extra: Mapping[tuple[str | int, ...], TensorEntry] | None = None,
) -> dict[str, TensorEntry]:
    """Tensors by the name they get outside: all by their full name, or those below ``keys``.

    ``extra`` are further paths that lead to tensors (tied weights). With one key its prefix goes away, so that ``keys=["model"]`` gives the model's own names. What every
    rank kept for itself has ``@rank`` behind it. Raises ``StateMismatch`` for a key that names nothing.
    """
    wanted = None if keys is None else list(keys)
    found: dict[str, TensorEntry] = {}
    hit: set[str] = set()
    paths = [(entry.path, entry) for entry in manifest.tensors.values()] + list((extra or {}).items())
    for path, entry in paths:
        name = dotted(path)
        own = "" if entry.rank is None else f"@{entry.rank}"
        if wanted is None:
            found[_free(name + own, found)] = entry
            continue
        key = next((key for key in wanted if name == key or name.startswith(key + ".")), None)
        if key is None:
            continue
        hit.add(key)
        if len(wanted) == 1 and name != key:
            name = name[len(key) + 1 :]
        found[_free(name + own, found)] = entry
    missing = [key for key in wanted or [] if key not in hit]
    if missing:
        import difflib

        names = sorted(
            {dotted(e.path) for e in manifest.tensors.values()}
            | {str(e.path[0]) for e in manifest.tensors.values() if e.path}
        )
        near = difflib.get_close_matches(missing[0], names, 3, 0.4) or names[:5]
        raise StateMismatch(
            f"no tensor of step {manifest.step} is below {', '.join(missing)}",
            where=manifest.name,
            expected="perhaps " + ", ".join(near) if near else "a checkpoint with tensors",
            next_step="serai ckpt show",
        )
    return found


def _free(name: str, taken: dict[str, TensorEntry]) -> str:
    """Two paths may join to one dotted name; the later one is told apart as in the shards."""
    if name not in taken:
        return name
    n = 2
    while f"{name}%{n}" in taken:
        n += 1
    return f"{name}%{n}"


def rechunk(parts: Iterable[memoryview | bytes], size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """The same bytes in parts of exactly ``size`` (the last one shorter), each valid until the next."""
    buffer = bytearray(size)
    filled = 0
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            taken = min(len(view), size - filled)
            buffer[filled : filled + taken] = view[:taken]
            filled += taken
            view = view[taken:]
            if filled == size:
                yield memoryview(buffer)
                filled = 0
    if filled:
        yield memoryview(buffer)[:filled]


def shared_names(values: bytes, manifest: Manifest) -> dict[tuple[str | int, ...], str]:
    """Paths that lead to a tensor stored under another path (tied weights), each with that tensor's name."""
    found: dict[tuple[str | int, ...], str] = {}

    def walk(tree: Any, path: tuple[str | int, ...]) -> None:
        if isinstance(tree, list):
            for i, item in enumerate(tree):
                walk(item, (*path, i))
        elif isinstance(tree, dict):
            tag = next(iter(tree)) if len(tree) == 1 else ""
            if tag == "$tensor":
                entry = manifest.tensors.get(str(tree[tag]))
                if entry is not None and entry.path != path:
                    found[path] = entry.name
            elif tag == "$module":
                for key, name in (tree[tag].get("aliases") or {}).items():
                    found[(*path, key)] = str(name)
            elif tag == "$tuple":
                walk(tree[tag], path)
            elif not tag.startswith("$"):
                for key, item in tree.items():
                    walk(item, (*path, key))

    for name, tree in json.loads(values)["values"].items():
        walk(tree["same"] if "same" in tree else tree["ranks"][0], (name,))
    return {path: name for path, name in found.items() if name in manifest.tensors}
