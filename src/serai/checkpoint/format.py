"""The format on disk: a folder a generation, holding safetensors shards, ``values.json`` and a manifest.

    step-00001000-0003-000012/
        shard-00000-of-00008.safetensors    a valid safetensors file; data start on a 4 KiB boundary
        values.json                         plain values, per rank where they differ
        manifest.json                       written last: every tensor's boxes, every file's checksums

Only a manifest that verifies makes a checkpoint; directory names mean nothing. Everything here is plain
Python: the agent, which imports no torch, writes these files and anybody may read them.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from serai.checkpoint.hashing import CHUNK_BYTES, HASH_NAME, chunk_count, hex_digest
from serai.checkpoint.layout import Box
from serai.errors import CheckpointCorrupt

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "MANIFEST",
    "VALUES",
    "DType",
    "FileEntry",
    "Manifest",
    "Piece",
    "TensorEntry",
    "generation_name",
    "pack_header",
    "parse_header",
    "shard_name",
]

SCHEMA_VERSION = 1
ALIGNMENT = 4096
MANIFEST = "manifest.json"
VALUES = "values.json"
MAX_MANIFEST_BYTES = 1 << 30
_CHECKSUM = b',"checksum":"'
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\Z")


@dataclass(frozen=True)
class DType:
    """How a torch dtype lies in a safetensors file.

    ``code`` is the safetensors name; a type safetensors lacks is stored as bytes (``U8`` with one more
    dimension of ``itemsize``), and only the manifest knows its real name.
    """

    name: str
    itemsize: int
    code: str
    opaque: bool = False


def _dtypes() -> dict[str, DType]:
    known = {
        "float64": (8, "F64"),
        "float32": (4, "F32"),
        "float16": (2, "F16"),
        "bfloat16": (2, "BF16"),
        "int64": (8, "I64"),
        "int32": (4, "I32"),
        "int16": (2, "I16"),
        "int8": (1, "I8"),
        "uint64": (8, "U64"),
        "uint32": (4, "U32"),
        "uint16": (2, "U16"),
        "uint8": (1, "U8"),
        "bool": (1, "BOOL"),
        "float8_e4m3fn": (1, "F8_E4M3"),
        "float8_e5m2": (1, "F8_E5M2"),
        "complex64": (8, "C64"),
    }
    opaque = {
        "complex128": 16,
        "complex32": 4,
        "float8_e4m3fnuz": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float4_e2m1fn_x2": 1,
    }
    table = {name: DType(name, size, code) for name, (size, code) in known.items()}
    table.update({name: DType(name, size, "U8", opaque=True) for name, size in opaque.items()})
    return table


DTYPES: dict[str, DType] = _dtypes()


def generation_name(step: int, attempt: int, sequence: int) -> str:
    return f"step-{step:08d}-{attempt:04d}-{sequence:06d}"


def shard_name(rank: int, world_size: int, kind: str = "shard") -> str:
    """``kind`` is ``shard``, or ``frozen`` for parameters that do not train."""
    return f"{kind}-{rank:05d}-of-{world_size:05d}.safetensors"


def pack_header(pieces: Iterable[tuple[str, DType, tuple[int, ...], int]]) -> bytes:
    """The safetensors header for pieces ``(name, dtype, shape, nbytes)`` that lie end to end.

    Padded with spaces so that the data behind it start on ``ALIGNMENT``.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape, nbytes in pieces:
        stored = [*shape, dtype.itemsize] if dtype.opaque else list(shape)
        table[name] = {"dtype": dtype.code, "shape": stored, "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    total = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    return struct.pack("<Q", total - 8) + text.ljust(total - 8, b" ")


def parse_header(head: bytes, file_size: int) -> tuple[dict[str, Any], int]:
    """The table of a safetensors file and where its data start. ``head`` holds at least the header."""
    if len(head) < 8:
        raise CheckpointCorrupt("a shard is shorter than its header")
    (length,) = struct.unpack("<Q", head[:8])
    if length > file_size - 8 or length > len(head) - 8:
        raise CheckpointCorrupt("a shard's header is longer than the file")
    try:
        table = json.loads(head[8 : 8 + length])
    except ValueError as error:
        raise CheckpointCorrupt(f"a shard's header is no JSON: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointCorrupt("a shard's header is no table")
    return table, 8 + length


@dataclass(frozen=True)
class FileEntry:
    """One shard file: its size and the checksum of each of its chunks, in order."""

    name: str
    size: int
    chunks: tuple[str, ...]
    chunk_bytes: int = CHUNK_BYTES

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bytes": self.size,
            "chunk_bytes": self.chunk_bytes,
            "hash": HASH_NAME,
            "chunks": list(self.chunks),
        }


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, C-ordered, at byte ``start`` of file number ``file``."""

    file: int
    start: int
    box: Box


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor.

    ``path`` are the keys that lead to it in the saved state. ``rank`` is set for tensors that every rank
    keeps for itself. ``detail`` holds what a dtype needs beside its bytes (quantisation parameters).
    """

    name: str
    path: tuple[str | int, ...]
    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    rank: int | None = None
    detail: dict[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """Everything about one generation; see ``docs/checkpointing.md`` for the file it is written to."""

    run: str
    step: int
    attempt: int
    sequence: int
    created: float
    world_size: int
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    values_size: int
    values_digest: str
    software: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return generation_name(self.step, self.attempt, self.sequence)

    @property
    def key(self) -> tuple[int, int]:
        """Orders generations: the newest is the highest (attempt, sequence), never the highest step."""
        return (self.attempt, self.sequence)

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files) + self.values_size

    def to_bytes(self) -> bytes:
        """The file: one line of JSON whose last member is the checksum of every byte before it."""
        document = {
            "format": "serai-checkpoint",
            "schema_version": SCHEMA_VERSION,
            "run": self.run,
            "step": self.step,
            "attempt": self.attempt,
            "sequence": self.sequence,
            "created": self.created,
            "world_size": self.world_size,
            "software": self.software,
            "metrics": self.metrics,
            "values": {
                "name": VALUES,
                "bytes": self.values_size,
                "hash": HASH_NAME,
                "digest": self.values_digest,
            },
            "files": [file.to_json() for file in self.files],
            "tensors": {name: _tensor_to_json(tensor) for name, tensor in self.tensors.items()},
        }
        body = json.dumps(document, separators=(",", ":")).encode()[:-1]
        return body + _CHECKSUM + hex_digest(body).encode() + b'"}\n'

    @staticmethod
    def from_bytes(data: bytes, where: str) -> Manifest:
        """Parse and verify. Lenient about unknown keys (a newer serai may add some), strict about the rest.

        Raises ``CheckpointCorrupt`` for anything that does not verify or points outside its own files.
        """
        cut = data.rfind(_CHECKSUM)
        if cut < 0 or not data.rstrip().endswith(b'"}'):
            raise CheckpointCorrupt("the manifest is cut short", where=where)
        stated = data[cut + len(_CHECKSUM) :].rstrip()[:-2].decode("ascii", "replace")
        if hex_digest(data[:cut]) != stated:
            raise CheckpointCorrupt("the manifest's checksum does not match its bytes", where=where)
        try:
            document = json.loads(data)
            if document["format"] != "serai-checkpoint":
                raise ValueError(f"format is {document['format']!r}")
            if int(document["schema_version"]) > SCHEMA_VERSION:
                raise CheckpointCorrupt(
                    f"the manifest has schema version {document['schema_version']}, this serai reads up to "
                    f"{SCHEMA_VERSION}",
                    where=where,
                    next_step="pip install --upgrade serai",
                )
            return _manifest_from_json(document)
        except CheckpointCorrupt as error:
            error.where = error.where or where
            raise
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            IndexError,
            OverflowError,
            RecursionError,
        ) as error:
            raise CheckpointCorrupt(f"the manifest makes no sense: {error!r}", where=where) from error


def _tensor_to_json(tensor: TensorEntry) -> dict[str, Any]:
    document: dict[str, Any] = {
        "path": list(tensor.path),
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "pieces": [
            {"file": p.file, "start": p.start, "offsets": list(p.box.offsets), "lengths": list(p.box.lengths)}
            for p in tensor.pieces
        ],
    }
    if tensor.rank is not None:
        document["rank"] = tensor.rank
    if tensor.detail:
        document["detail"] = tensor.detail
    return document


def _manifest_from_json(document: dict[str, Any]) -> Manifest:
    files = tuple(_file_from_json(entry) for entry in document["files"])
    if len({file.name for file in files}) != len(files):
        raise ValueError("two files have one name")
    tensors = {
        str(name): _tensor_from_json(str(name), entry, files) for name, entry in document["tensors"].items()
    }
    values = document["values"]
    if values["name"] != VALUES:
        raise ValueError(f"values are in {values['name']!r}")
    return Manifest(
        run=str(document["run"]),
        step=_natural(document["step"]),
        attempt=_natural(document["attempt"]),
        sequence=_natural(document["sequence"]),
        created=float(document["created"]),
        world_size=_natural(document["world_size"]),
        files=files,
        tensors=tensors,
        values_size=_natural(values["bytes"]),
        values_digest=str(values["digest"]),
        software={str(k): str(v) for k, v in document.get("software", {}).items()},
        metrics={str(k): float(v) for k, v in document.get("metrics", {}).items()},
    )


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0 or value >= 1 << 63:
        raise ValueError(f"{value!r} is no count")
    return value


def _file_from_json(entry: dict[str, Any]) -> FileEntry:
    name = entry["name"]
    if not isinstance(name, str) or not _SAFE_NAME.match(name):
        raise ValueError(f"{name!r} is no file name inside the checkpoint")
    size = _natural(entry["bytes"])
    chunk = _natural(entry["chunk_bytes"])
    if chunk == 0 or entry["hash"] != HASH_NAME or chunk_count(size, chunk) != len(entry["chunks"]):
        raise ValueError(f"the checksums of {name} do not cover it")
    return FileEntry(name, size, tuple(str(c) for c in entry["chunks"]), chunk)


def _tensor_from_json(name: str, entry: dict[str, Any], files: tuple[FileEntry, ...]) -> TensorEntry:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"{name} has the unknown dtype {entry['dtype']!r}")
    shape = tuple(_natural(n) for n in entry["shape"])
    pieces = []
    total = 0
    for document in entry["pieces"]:
        box = Box(
            tuple(_natural(n) for n in document["offsets"]), tuple(_natural(n) for n in document["lengths"])
        )
        piece = Piece(_natural(document["file"]), _natural(document["start"]), box)
        if not box.fits(shape):
            raise ValueError(f"a piece of {name} lies outside its shape")
        if piece.start + box.count * dtype.itemsize > files[piece.file].size:
            raise ValueError(f"a piece of {name} lies outside {files[piece.file].name}")
        total += box.count
        pieces.append(piece)
    if total != math.prod(shape) or _overlap([piece.box for piece in pieces]):
        raise ValueError(f"the pieces of {name} do not cover it exactly once")
    path = tuple(k if isinstance(k, int) and not isinstance(k, bool) else str(k) for k in entry["path"])
    rank = entry.get("rank")
    return TensorEntry(
        name, path, dtype, shape, tuple(pieces), None if rank is None else _natural(rank), entry.get("detail")
    )


def _overlap(boxes: list[Box]) -> bool:
    """Whether two of the boxes have a common element. Sorted by the first dimension, so near-linear."""
    active: list[Box] = []
    for box in sorted(boxes):
        if not box.count:
            continue
        if not box.offsets:
            if active:
                return True
        else:
            active = [a for a in active if a.offsets[0] + a.lengths[0] > box.offsets[0]]
            if any(a.intersect(box) for a in active):
                return True
        active.append(box)
    return False
