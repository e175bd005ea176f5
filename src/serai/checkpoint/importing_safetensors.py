"""Safetensors as a source: a file, or a folder with or without an index. Streamed; needs no torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from serai.checkpoint.format import DTYPES, DType, parse_header
from serai.checkpoint.importing import Incoming, Source
from serai.errors import CheckpointCorrupt, CheckpointError

__all__ = ["open_safetensors"]

_BLOCK = 16 << 20
_MAX_HEADER = 256 << 20
_CODES: dict[str, DType] = {dtype.code: dtype for dtype in DTYPES.values() if not dtype.opaque}
_CODES["F8_E8M0"] = DTYPES["float8_e8m0fnu"]


def open_safetensors(path: Path, name: str) -> Source:
    """The tensors of a file or folder as one module called ``name``.

    Raises ``CheckpointCorrupt`` (S436) for headers that do not fit their files and for a folder that
    lacks what its index promises; no byte outside the files is ever read.
    """
    files, promised = _files(path)
    source = Source()
    aliases: dict[str, str] = {}
    seen: dict[str, Path] = {}
    for file in files:
        for key, dtype, shape, offset, nbytes in _tensors(file, aliases):
            if key in seen:
                raise CheckpointCorrupt(
                    f"{key} is in {seen[key].name} and in {file.name}", code="S436", where=str(file)
                )
            seen[key] = file
            source.tensors.append(
                Incoming(f"{name}.{key}", (name, key), dtype, shape, _reader(file, offset, nbytes))
            )
    missing = [key for key in promised if key not in seen]
    if missing:
        raise CheckpointCorrupt(
            f"the index promises {', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}, which no file has",
            code="S436",
            where=str(path),
            expected="all files of the folder",
        )
    body: dict[str, Any] = {"path": [name]}
    tied = {a: f"{name}.{key}" for a, key in aliases.items() if key in seen and a not in seen}
    if tied:
        body["aliases"] = tied
    source.trees[name] = {"$module": body}
    return source


def _files(path: Path) -> tuple[list[Path], list[str]]:
    """The files to read, and the names that an index says they hold."""
    if path.is_file():
        return [path], []
    found = sorted(path.glob("*.safetensors.index.json"))
    if not found:
        return sorted(path.glob("*.safetensors")), []
    try:
        index = json.loads(found[0].read_bytes())["weight_map"]
        names = sorted({str(file) for file in index.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(
            f"{found[0].name} is no index: {error!r}", code="S436", where=str(found[0])
        ) from error
    for name in names:
        if "/" in name or name in ("", ".", "..") or not (path / name).is_file():
            raise CheckpointCorrupt(
                f"{found[0].name} names {name!r}, which is not in the folder",
                code="S436",
                where=str(found[0]),
                expected="all files of the folder",
            )
    return [path / name for name in names], [str(key) for key in index]


def _tensors(file: Path, aliases: dict[str, str]) -> Iterator[tuple[str, DType, tuple[int, ...], int, int]]:
    """Name, dtype, shape, offset in the file and bytes of every tensor in a file, checked against its size."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if length > min(_MAX_HEADER, size):
            raise CheckpointCorrupt(f"{file.name} is no safetensors file", code="S436", where=str(file))
        head += stream.read(length)
    try:
        table, start = parse_header(head, size)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(f"{file.name}: {error.message}", code="S436", where=str(file)) from error
    metadata = table.pop("__metadata__", None) or {}
    try:
        items = [
            (str(name), entry["dtype"], tuple(entry["shape"]), tuple(entry["data_offsets"]))
            for name, entry in table.items()
        ]
    except (KeyError, TypeError) as error:
        raise CheckpointCorrupt(
            f"{file.name}'s header makes no sense: {error!r}", code="S436", where=str(file)
        ) from error
    for name, code, shape, offsets in sorted(items, key=lambda item: str(item[3])):
        dtype = _CODES.get(str(code))
        if dtype is None:
            raise CheckpointError(
                f"{name} has the type {code}, which is unknown here",
                code="S434",
                where=str(file),
                expected=", ".join(sorted(_CODES)),
            )
        numbers = [*shape, *offsets]
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers) or len(offsets) != 2:
            raise CheckpointCorrupt(f"{name} has no sane shape", code="S436", where=str(file))
        begin, end = offsets
        if end - begin != math.prod(shape) * dtype.itemsize or start + end > size:
            raise CheckpointCorrupt(f"{name} does not fit its file", code="S436", where=str(file))
        yield name, dtype, shape, start + begin, end - begin
    if isinstance(metadata, dict):
        # safetensors' own save_model writes names of tied tensors there.
        names = {name for name, *_ in items}
        aliases.update({str(a): str(b) for a, b in metadata.items() if b in names and a not in names})


def _reader(file: Path, offset: int, nbytes: int) -> Callable[[], Iterator[bytes]]:
    def parts() -> Iterator[bytes]:
        with open(file, "rb") as stream:
            stream.seek(offset)
            left = nbytes
            while left:
                part = stream.read(min(left, _BLOCK))
                if not part:
                    raise CheckpointCorrupt(f"{file.name} became shorter", code="S436", where=str(file))
                yield part
                left -= len(part)

    return parts
