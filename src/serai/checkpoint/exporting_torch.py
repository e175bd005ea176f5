"""Exports that need torch: a DCP folder, or one file of ``torch.save``. Both are read back and compared."""

from __future__ import annotations

import collections
import os
import pickle
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from serai.checkpoint.dcp import read_dcp_tensors, write_dcp
from serai.checkpoint.exporting import (
    ExportFormat,
    ExportReport,
    check_room,
    sync_folder,
    target_exists,
    translated,
)
from serai.checkpoint.reader import load_generation
from serai.checkpoint.stream import TensorStream
from serai.errors import CheckpointError
from serai.storage.keys import TEMPORARY

__all__ = ["export_torch"]

_COMPARED_AT_ONCE = 256 << 20


def export_torch(
    stream: TensorStream,
    target: Path,
    keys: list[str] | None,
    to: ExportFormat,
    progress: Callable[[int, int], None] | None,
) -> ExportReport:
    """Write the nested dict that ``serai.load`` gives; with one key, what is below it.

    The whole state is held in memory once, since neither format can be written otherwise.
    """
    if target.exists():
        raise target_exists(target)
    nbytes = stream.manifest.nbytes
    check_room(target.parent, 0 if keys else nbytes)
    state = load_generation(stream.storage, stream.folder, stream.manifest, keys)
    if keys is not None and len(keys) == 1:
        state = _below(state, keys[0])
    plain = _plain(state)
    tensors = dict(_tensors(plain, ()))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if progress is not None:
        progress(0, total)
    with translated(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{TEMPORARY}{secrets.token_hex(6)}"
    try:
        with translated(temporary):
            if to is ExportFormat.TORCH:
                _write_torch(plain, temporary)
                _compare(tensors, _tensors(_read_torch(temporary, target), ()), target)
            else:
                write_dcp(plain if isinstance(plain, dict) else {"value": plain}, temporary)
                _compare_dcp(tensors, temporary, target)
            if target.exists():
                raise target_exists(target)
            os.rename(temporary, target)
            sync_folder(target.parent)
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise
    if progress is not None:
        progress(total, total)
    files = [target] if target.is_file() else sorted(p for p in target.rglob("*") if p.is_file())
    return ExportReport(
        step=stream.manifest.step,
        generation=stream.manifest.name,
        format=to.value,
        target=str(target),
        files=tuple(str(path) for path in files),
        tensors=len(tensors),
        bytes=total,
    )


def _below(tree: Any, key: str) -> Any:
    """What lies at a dotted name, whose parts may hold dots themselves."""
    if not key:
        return tree
    items: Any = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for name, item in items:
        text = str(name)
        if key == text or key.startswith(text + "."):
            return _below(item, key[len(text) + 1 :])
    raise CheckpointError(f"nothing is called {key}", code="S400")


def _plain(value: Any) -> Any:
    """The same tree in types that ``torch.load(weights_only=True)`` takes: numpy becomes tensors and numbers."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, frozenset):
        return set(value)
    if isinstance(value, collections.OrderedDict):
        return collections.OrderedDict((key, _plain(item)) for key, item in value.items())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_plain(item) for item in value)
    return value


def _tensors(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, (*path, key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(item, (*path, i))


def _write_torch(value: Any, path: Path) -> None:
    with open(path, "xb") as stream:
        torch.save(value, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _read_torch(path: Path, target: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise _differs(target, str(error).splitlines()[0]) from error


def _compare(
    written: Mapping[tuple[Any, ...], torch.Tensor],
    found: Iterator[tuple[tuple[Any, ...], torch.Tensor]],
    target: Path,
) -> None:
    seen = 0
    for path, tensor in found:
        seen += 1
        if path not in written or not _same(written[path], tensor):
            raise _differs(target, ".".join(map(str, path)))
    if seen != len(written):
        raise _differs(target, f"{len(written) - seen} tensors are missing")


def _compare_dcp(tensors: Mapping[tuple[Any, ...], torch.Tensor], folder: Path, target: Path) -> None:
    """DCP has been seen to commit a checkpoint with half its tensors on a full disk: so every one is read."""
    waiting: dict[tuple[Any, ...], torch.Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal size
        _compare(waiting, iter(read_dcp_tensors(folder, list(waiting))), target)
        waiting.clear()
        size = 0

    for path, tensor in tensors.items():
        waiting[path] = tensor
        size += tensor.numel() * tensor.element_size()
        if size >= _COMPARED_AT_ONCE:
            flush()
    flush()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_quantized:
        return bool(torch.equal(a.int_repr(), b.int_repr()))
    if not a.numel():
        return True
    # Bytes, since NaN is not equal to itself.
    return bool(
        torch.equal(
            *(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)),
        )
    )


def _differs(target: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{target} does not read back as it was written: {what}",
        code="S430",
        where=str(target),
        expected="the tensors of the checkpoint",
        next_step="look at the disk's free space, then export again",
    )
