"""A shuffled order that needs no memory: entry ``i`` of epoch ``e`` is computed, not stored.

A four-round Feistel network permutes the next power of four above ``size``; values that fall outside are
sent through again until they fall inside ("cycle walking"), which keeps it a permutation of ``size``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["permute"]

_ROUNDS = 4
_MASK = (1 << 64) - 1


def permute(positions: NDArray[np.int64], *, size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where each position of an epoch leads: ``[n] int64`` → ``[n] int64``, both in ``0..size - 1``."""
    if size <= 1:
        return np.zeros_like(positions)
    half = (max(1, (size - 1).bit_length()) + 1) // 2
    low = np.uint64((1 << half) - 1)
    shift = np.uint64(half)
    key = _mix_int(_mix_int(seed) ^ _mix_int(epoch + 0x9E3779B97F4A7C15))
    keys = [np.uint64(_mix_int(key + number)) for number in range(_ROUNDS)]
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> shift, values[outside] & low
        for key_of_round in keys:
            left, right = right, left ^ (_mix(right ^ key_of_round) & low)
        values[outside] = (left << shift) | right
        outside = values >= size
    return values.astype(np.int64)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _mix_int(value: int) -> int:
    return int(_mix(np.array([value & _MASK], dtype=np.uint64))[0])
