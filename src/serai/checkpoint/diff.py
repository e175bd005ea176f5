"""What differs between two checkpoints: which tensors and values, and by how much. No torch needed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serai.checkpoint.format import DType, Manifest, TensorEntry
from serai.checkpoint.stream import TensorStream, select
from serai.errors import CheckpointCorrupt

__all__ = ["DiffReport", "TensorDiff", "ValueDiff", "diff"]

Array = np.ndarray[Any, np.dtype[Any]]
_ABSENT = "(absent)"


@dataclass(frozen=True)
class TensorDiff:
    """One tensor that is not the same on both sides.

    Attributes:
        kind: ``"values"``, ``"shape"``, ``"dtype"``, ``"missing"`` (only on the left side) or ``"extra"``
            (only on the right).
        count: elements whose bytes differ, of ``total``.
        max_abs: largest difference of two finite elements, as float64 (of the modulus for complex).
        max_rel: largest such difference over the larger of the two magnitudes.
        not_finite: differing elements where either side is NaN or infinite.
        left, right: dtype and shape, as text.
    """

    name: str
    kind: str
    left: str
    right: str
    count: int = 0
    total: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    not_finite: int = 0


@dataclass(frozen=True)
class ValueDiff:
    """One plain value that differs, as JSON text."""

    path: str
    left: str
    right: str


@dataclass(frozen=True)
class DiffReport:
    """What ``diff`` found. ``same`` when every tensor and value is equal, bit for bit."""

    left: str
    right: str
    left_step: int
    right_step: int
    tensors: tuple[TensorDiff, ...] = field(default=())
    values: tuple[ValueDiff, ...] = field(default=())
    equal_tensors: int = 0
    bytes: int = 0

    @property
    def same(self) -> bool:
        return not self.tensors and not self.values


def diff(
    left: TensorStream,
    right: TensorStream,
    *,
    keys: Iterable[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Compare two generations, tensor by tensor, in bounded memory; every byte read is verified.

    Args:
        keys: only what is below these dotted names; plain values are then compared below them too.
        progress: called with (bytes compared, bytes in all) of the left side.

    Raises ``CheckpointCorrupt`` when either side does not verify.
    """
    wanted = None if keys is None else list(keys)
    mine = _by_full_name(left.manifest, wanted)
    theirs = _by_full_name(right.manifest, wanted)
    total = sum(entry.nbytes for entry in mine.values())
    found: list[TensorDiff] = []
    equal = done = 0
    for name, a in mine.items():
        b = theirs.get(name)
        if b is None:
            found.append(TensorDiff(name, "missing", _kind_of(a), _ABSENT))
        elif a.shape != b.shape or a.dtype != b.dtype or a.detail != b.detail:
            kind = "shape" if a.shape != b.shape else "dtype"
            found.append(TensorDiff(name, kind, _kind_of(a), _kind_of(b)))
        else:
            differing = _compare(name, a, left.tensor(a), right.tensor(b))
            if differing is None:
                equal += 1
            else:
                found.append(differing)
        done += a.nbytes
        if progress is not None:
            progress(done, total)
    found += [
        TensorDiff(name, "extra", _ABSENT, _kind_of(b)) for name, b in theirs.items() if name not in mine
    ]
    return DiffReport(
        left=left.manifest.name,
        right=right.manifest.name,
        left_step=left.manifest.step,
        right_step=right.manifest.step,
        tensors=tuple(found),
        values=tuple(_values(left, right, wanted)),
        equal_tensors=equal,
        bytes=left.bytes_read + right.bytes_read,
    )


def _by_full_name(manifest: Manifest, wanted: list[str] | None) -> dict[str, TensorEntry]:
    """Tensors by full dotted name; one that exists on one side only is a finding, no error."""
    entries = select(manifest, None)
    return {name: entry for name, entry in entries.items() if _is_wanted(name, wanted)}


def _is_wanted(name: str, wanted: list[str] | None) -> bool:
    return wanted is None or any(name == key or name.startswith((key + ".", key + "@")) for key in wanted)


def _kind_of(entry: TensorEntry) -> str:
    return f"{entry.dtype.name} {'×'.join(map(str, entry.shape)) or 'scalar'}"


def _compare(
    name: str, entry: TensorEntry, left: Iterable[memoryview], right: Iterable[memoryview]
) -> TensorDiff | None:
    size = entry.dtype.itemsize
    count = not_finite = 0
    max_abs = max_rel = 0.0
    finite_seen = False
    for a, b in _in_step(left, right, size):
        if a == b:
            continue
        raw_a = np.frombuffer(a, dtype=np.uint8).reshape(-1, size)
        raw_b = np.frombuffer(b, dtype=np.uint8).reshape(-1, size)
        where = (raw_a != raw_b).any(axis=1)
        count += int(where.sum())
        x, y = _numbers(raw_a[where], entry.dtype), _numbers(raw_b[where], entry.dtype)
        finite = np.isfinite(x) & np.isfinite(y)
        not_finite += int((~finite).sum())
        if finite.any():
            finite_seen = True
            x, y = x[finite], y[finite]
            with np.errstate(over="ignore", invalid="ignore"):
                gap = np.abs(x - y)
                scale = np.maximum(np.abs(x), np.abs(y))
                relative = np.divide(gap, scale, out=np.zeros_like(gap), where=scale > 0)
            max_abs = max(max_abs, float(gap.max()))
            max_rel = max(max_rel, float(relative.max()))
    if not count:
        return None
    return TensorDiff(
        name,
        "values",
        _kind_of(entry),
        _kind_of(entry),
        count=count,
        total=entry.nbytes // size,
        max_abs=max_abs if finite_seen else None,
        max_rel=max_rel if finite_seen else None,
        not_finite=not_finite,
    )


def _in_step(
    left: Iterable[memoryview], right: Iterable[memoryview], size: int
) -> Iterator[tuple[bytes, bytes]]:
    """Two byte streams in equal parts of whole elements, however each was cut."""
    streams = (iter(left), iter(right))
    buffers = [bytearray(), bytearray()]
    open_ends = [True, True]
    while True:
        for i in (0, 1):
            if open_ends[i] and len(buffers[i]) < size:
                part = next(streams[i], None)
                if part is None:
                    open_ends[i] = False
                else:
                    buffers[i] += part
        length = min(len(buffers[0]), len(buffers[1])) // size * size
        if length:
            yield bytes(buffers[0][:length]), bytes(buffers[1][:length])
            for buffer in buffers:
                del buffer[:length]
        elif not any(open_ends):
            return


_COMPLEX = {"complex64": np.complex64, "complex128": np.complex128}
_REAL = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16,
    "int64": np.int64, "int32": np.int32, "int16": np.int16, "int8": np.int8,
    "uint64": np.uint64, "uint32": np.uint32, "uint16": np.uint16, "uint8": np.uint8, "bool": np.uint8,
}  # fmt: skip


def _numbers(raw: Array, dtype: DType) -> Array:
    """Elements ``[n, itemsize] uint8`` as float64 (complex128 for complex ones)."""
    raw = np.ascontiguousarray(raw)
    if dtype.name == "bfloat16":
        wide = raw.view("<u2").astype(np.uint32) << 16
        return np.asarray(wide.reshape(-1).view(np.float32), dtype=np.float64)
    if dtype.name in _COMPLEX:
        return raw.view(_COMPLEX[dtype.name]).reshape(-1).astype(np.complex128)
    if dtype.name in _REAL:
        return raw.view(_REAL[dtype.name]).reshape(-1).astype(np.float64)
    import torch  # the small floats: numpy has none of them

    tensor = torch.from_numpy(raw.copy()).reshape(-1).view(getattr(torch, dtype.name))
    if dtype.name == "float4_e2m1fn_x2":
        return raw.reshape(-1).astype(np.float64)  # two packed numbers: the byte stands for both
    wide_type = torch.complex128 if tensor.is_complex() else torch.float64
    return np.asarray(tensor.to(wide_type).numpy())


def _values(left: TensorStream, right: TensorStream, wanted: list[str] | None) -> Iterator[ValueDiff]:
    mine, theirs = (dict(_leaves(side)) for side in (left, right))
    for path in [*mine, *(path for path in theirs if path not in mine)]:
        a, b = mine.get(path, _ABSENT), theirs.get(path, _ABSENT)
        if a != b and _is_wanted(path, wanted):
            yield ValueDiff(path, a, b)


def _leaves(side: TensorStream) -> Iterator[tuple[str, str]]:
    try:
        document = json.loads(side.values())["values"]
        for name, tree in document.items():
            if "same" in tree:
                yield from _walk(tree["same"], name)
            else:
                for rank, one in enumerate(tree["ranks"]):
                    yield from _walk(one, f"{name}@{rank}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(
            f"the stored values of {side.folder} make no sense: {error!r}", where=side.folder
        ) from error


def _walk(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    """Leaves of a tree of plain values, the tags of containers left out of their paths."""
    if isinstance(tree, dict) and len(tree) == 1:
        tag, body = next(iter(tree.items()))
        if tag in ("$tuple", "$module", "$optimizer"):
            yield from _walk(body, path)
            return
        if tag.startswith("$"):
            if tag != "$tensor":
                yield path, json.dumps(tree, sort_keys=True, ensure_ascii=False)
            return
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from _walk(item, f"{path}.{key}")
    elif isinstance(tree, list) and any(isinstance(item, dict | list) for item in tree):
        for i, item in enumerate(tree):
            yield from _walk(item, f"{path}.{i}")
    else:
        yield path, json.dumps(tree, ensure_ascii=False)
