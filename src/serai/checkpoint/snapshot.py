"""Copying live tensors into a slot: with all cores from CPU memory, in stream order from a GPU."""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from serai.checkpoint.format import ALIGNMENT
from serai.checkpoint.memory import Mapping, Span, copy_spans
from serai.checkpoint.planning import PlannedPiece, SavePlan
from serai.checkpoint.state import Leaf

__all__ = ["fill_slot", "fill_window", "probe_replicas"]

_SAMPLE_BYTES = 8


def fill_slot(
    plan: SavePlan, leaves: Sequence[Leaf], slot: Mapping, pool: ThreadPoolExecutor | None, threads: int
) -> None:
    """Make the slot's bytes the files' bytes. On return every source may change again.

    Addresses are taken now, from the tensors of this save.
    """
    fill_window(plan, leaves, slot, 0, plan.total, pool, threads)


def fill_window(
    plan: SavePlan,
    leaves: Sequence[Leaf],
    slot: Mapping,
    start: int,
    stop: int,
    pool: ThreadPoolExecutor | None,
    threads: int,
) -> None:
    """The same for bytes ``start`` to ``stop`` of what would be a whole slot, put at the slot's beginning."""
    for file in plan.files:
        _put(slot, start, stop, file.offset, file.header)
        end = file.offset + file.size
        _put(slot, start, stop, end, bytes(-end % ALIGNMENT))
    spans: list[Span] = []
    devices: set[torch.device] = set()
    staged: list[torch.Tensor] = []
    for piece in plan.pieces:
        low, high = max(piece.slot, start), min(piece.slot + piece.nbytes, stop)
        if high <= low:
            continue
        leaf = leaves[piece.leaf]
        tensor = leaf.tensor
        skip = low - piece.slot
        if (
            tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
        ):
            address = tensor.data_ptr() + _row_offset(piece, leaf) + skip
        elif high - low == piece.nbytes and piece.slot - start + piece.nbytes <= slot.size:
            # Device copies are queued first and run while the CPU copies.
            _copy_tensor(slot, piece, leaf, piece.slot - start)
            if tensor.device.type != "cpu":
                devices.add(tensor.device)
            continue
        else:
            whole = _part(piece, leaf).resolve_conj().resolve_neg().cpu().contiguous()
            staged.append(whole)
            address = whole.data_ptr() + skip
        spans.append((slot.address + low - start, address, high - low))
    copy_spans(spans, pool, threads)
    for device in devices:
        torch.accelerator.synchronize(device)


def _put(slot: Mapping, start: int, stop: int, place: int, data: bytes) -> None:
    """Put ``data``, which belongs at ``place``, where the window ``start`` to ``stop`` shows it."""
    low, high = max(place, start), min(place + len(data), stop)
    if high > low:
        slot.memory[low - start : high - start] = data[low - place : high - place]


def _row_offset(piece: PlannedPiece, leaf: Leaf) -> int:
    """Bytes from the start of a contiguous leaf to the piece, which is whole rows of it."""
    if not leaf.box.lengths or not leaf.box.lengths[0]:
        return 0
    rows = piece.box.offsets[0] - leaf.box.offsets[0]
    return rows * (leaf.nbytes // leaf.box.lengths[0])


def _part(piece: PlannedPiece, leaf: Leaf) -> torch.Tensor:
    if leaf.box.lengths and piece.box != leaf.box:
        first = piece.box.offsets[0] - leaf.box.offsets[0]
        return leaf.tensor[first : first + piece.box.lengths[0]]
    return leaf.tensor


def _copy_tensor(slot: Mapping, piece: PlannedPiece, leaf: Leaf, place: int) -> None:
    source = _part(piece, leaf)
    raw = torch.frombuffer(slot.memory, dtype=torch.uint8, count=piece.nbytes, offset=place)
    target = raw.view(source.dtype).view(source.shape)
    target.copy_(source, non_blocking=source.device.type != "cpu")


def probe_replicas(plan: SavePlan, leaves: Sequence[Leaf], sequence: int) -> dict[str, Any]:
    """A few bytes of every tensor that other ranks hold too, at a place that moves from save to save.

    Ranks sample the same places, so unequal samples prove that the tensors are no replicas. Device
    tensors are left out: reading them would wait for the GPU.
    """
    if not plan.probes:
        return {}
    names = []
    samples = bytearray()
    for number, key in plan.probes:
        leaf = leaves[number]
        tensor = leaf.tensor
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            continue
        place = (sequence * 2654435761 + key) % leaf.nbytes
        place -= place % leaf.dtype.itemsize
        count = min(_SAMPLE_BYTES, leaf.nbytes - place)
        names.append(leaf.name)
        samples += ctypes.string_at(tensor.data_ptr() + place, count).ljust(_SAMPLE_BYTES, b"\0")
    return {"names": names, "samples": base64.b64encode(samples).decode(), "width": _SAMPLE_BYTES}
