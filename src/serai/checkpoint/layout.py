"""Boxes: the n-dimensional rectangles in which tensors are saved, and who writes which.

A piece of a tensor is (global shape, offsets, lengths). Loading intersects the boxes wanted with the
boxes stored, so any world size and any sharding reads what any other wrote.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Box", "Shared", "assign", "covers", "span_pairs"]

# Below this, a replicated tensor is written whole by one rank: a split would cost more in the manifest
# than it balances on the disks.
SPLIT_BYTES = 1 << 20


@dataclass(frozen=True, order=True)
class Box:
    """A rectangle inside a tensor: ``offsets[d] <= index[d] < offsets[d] + lengths[d]``."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        return _whole(tuple(shape))

    @property
    def count(self) -> int:
        """Elements inside."""
        return math.prod(self.lengths)

    def intersect(self, other: Box) -> Box | None:
        """The common rectangle, or ``None`` when there is no common element. Scalars are one point."""
        offsets = []
        lengths = []
        for a, n, b, m in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True):
            low = max(a, b)
            high = min(a + n, b + m)
            if high <= low:
                return None
            offsets.append(low)
            lengths.append(high - low)
        return Box(tuple(offsets), tuple(lengths))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that pick this box out of an array that holds ``outer``."""
        return tuple(
            slice(a - b, a - b + n) for a, n, b in zip(self.offsets, self.lengths, outer.offsets, strict=True)
        )

    def fits(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.offsets) == len(self.lengths) and all(
            a >= 0 and n >= 0 and a + n <= size
            for a, n, size in zip(self.offsets, self.lengths, shape, strict=True)
        )

    def rows(self, start: int, stop: int) -> Box:
        """The part between two rows of the first dimension (counted inside this box)."""
        return Box(
            (self.offsets[0] + start, *self.offsets[1:]),
            (stop - start, *self.lengths[1:]),
        )


@functools.lru_cache(1 << 16)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), tuple(int(n) for n in shape))


def span_pairs(common: Box, source: Box, target: Box, itemsize: int) -> Iterator[tuple[int, int, int]]:
    """How to copy ``common`` between two C-ordered arrays that hold ``source`` and ``target``.

    Yields ``(source offset, target offset, bytes)``, as few and as long as the two layouts allow.
    """
    tail = len(common.lengths)
    run = itemsize
    while tail and common.lengths[tail - 1] == source.lengths[tail - 1] == target.lengths[tail - 1]:
        tail -= 1
        run *= common.lengths[tail]
    if tail == 0:
        yield 0, 0, run
        return
    run *= common.lengths[tail - 1]
    from_strides = _strides(source.lengths, itemsize)
    to_strides = _strides(target.lengths, itemsize)
    from_base = sum((c - s) * t for c, s, t in zip(common.offsets, source.offsets, from_strides, strict=True))
    to_base = sum((c - s) * t for c, s, t in zip(common.offsets, target.offsets, to_strides, strict=True))
    outer = [range(n) for n in common.lengths[: tail - 1]]
    for index in itertools.product(*outer):
        yield (
            from_base + sum(i * t for i, t in zip(index, from_strides, strict=False)),
            to_base + sum(i * t for i, t in zip(index, to_strides, strict=False)),
            run,
        )


def _strides(lengths: Sequence[int], itemsize: int) -> list[int]:
    strides = [itemsize] * len(lengths)
    for d in range(len(lengths) - 2, -1, -1):
        strides[d] = strides[d + 1] * lengths[d + 1]
    return strides


def covers(wanted: Box, stored: Iterable[Box]) -> bool:
    """Whether disjoint stored boxes hold every element of the wanted one."""
    have = 0
    for box in stored:
        common = wanted.intersect(box)
        if common is not None:
            have += common.count
    return have >= wanted.count


@dataclass(frozen=True)
class Shared:
    """A box that several ranks hold with equal content, to be written once."""

    name: str
    box: Box
    itemsize: int
    holders: tuple[int, ...]
    splittable: bool = True


def assign(items: Iterable[Shared], rank: int) -> list[tuple[str, Box]]:
    """The parts of shared boxes that ``rank`` writes: even by bytes over the holders, each byte once.

    Every rank computes the same assignment from the same items. Boxes are laid end to end in the given
    order and cut at equal byte marks; a cut inside a box falls on a row and only in boxes of
    ``SPLIT_BYTES`` or more.
    """
    groups: dict[tuple[int, ...], list[Shared]] = {}
    for item in items:
        groups.setdefault(item.holders, []).append(item)
    mine: list[tuple[str, Box]] = []
    for holders, group in groups.items():
        if rank not in holders:
            continue
        if len(holders) == 1:
            mine.extend((item.name, item.box) for item in group)
            continue
        total = sum(item.box.count * item.itemsize for item in group)
        share = max(1, -(-total // len(holders)))
        position = 0
        place = holders.index(rank)
        for item in group:
            nbytes = item.box.count * item.itemsize
            can_split = (
                item.splittable and nbytes >= SPLIT_BYTES and item.box.lengths and item.box.lengths[0] > 1
            )
            if not can_split:
                if min(position // share, len(holders) - 1) == place:
                    mine.append((item.name, item.box))
            else:
                rows = item.box.lengths[0]
                row_bytes = nbytes // rows
                start = _row_mark(place * share - position, row_bytes, rows)
                last = place == len(holders) - 1
                stop = rows if last else _row_mark((place + 1) * share - position, row_bytes, rows)
                if stop > start:
                    mine.append((item.name, item.box.rows(start, stop)))
            position += nbytes
    return mine


def _row_mark(byte: int, row_bytes: int, rows: int) -> int:
    return min(rows, max(0, -(-byte // row_bytes)))
