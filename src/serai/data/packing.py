"""The pack plan: which piece of which document lies in which row, decided once, before training.

A row is ``seq_len + 1`` tokens: the model sees the first ``seq_len`` and predicts the last ``seq_len``.
Documents are laid end to end and cut every ``seq_len`` tokens; each row begins with the token that the
row before ended with, so that every token but the very first is predicted exactly once. A row is stored as
its pieces (document, first token, tokens), so that any row can be read alone and document boundaries
are known, and so that another way of packing changes this file only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.data.shards import TokenShards

__all__ = ["IGNORE", "PackPlan", "Rows", "plan_rows"]

IGNORE = -100
"""Label of a position that is not predicted (torch's ``ignore_index``)."""


@dataclass(frozen=True)
class PackPlan:
    """Pieces of rows.

    Attributes:
        seq_len: tokens that a row predicts.
        pieces: ``[pieces, 3] int64``: document, first token in it, tokens.
        offsets: ``[rows + 1] int64``: row ``r`` has the pieces ``offsets[r]:offsets[r + 1]``.
    """

    seq_len: int
    pieces: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def predicted(self) -> NDArray[np.int64]:
        """Tokens that each row predicts: ``[rows] int64``."""
        lengths = (
            np.add.reduceat(self.pieces[:, 2], self.offsets[:-1]) if len(self) else np.zeros(0, np.int64)
        )
        return np.asarray(lengths - 1, dtype=np.int64)

    def save(self, folder: Path) -> list[str]:
        """Write ``pieces.npy`` and ``rows.npy``; returns their names."""
        np.save(folder / "pieces.npy", self.pieces)
        np.save(folder / "rows.npy", self.offsets)
        return ["pieces.npy", "rows.npy"]

    @classmethod
    def load(cls, folder: Path, *, seq_len: int) -> PackPlan:
        return cls(
            seq_len=seq_len,
            pieces=np.load(folder / "pieces.npy", mmap_mode="r", allow_pickle=False),
            offsets=np.load(folder / "rows.npy", mmap_mode="r", allow_pickle=False),
        )


def plan_rows(lengths: NDArray[np.int64], *, seq_len: int, keep_last: bool) -> PackPlan:
    """Cut documents of ``lengths`` tokens (``[documents] int64``, in this order) into rows.

    Args:
        keep_last: keep the last row although it is short (its rest is padding); else it is dropped, so
            that every row is full.
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    predicted = max(total - 1, 0)
    rows = -(-predicted // seq_len) if keep_last else predicted // seq_len
    pieces: list[tuple[int, int, int]] = []
    offsets = [0]
    document = 0
    for row in range(rows):
        position = row * seq_len
        stop = min(position + seq_len + 1, total)
        while ends[document] <= position:
            document += 1
        reading = document
        while position < stop:
            begin = int(ends[reading] - lengths[reading])
            take = min(stop, int(ends[reading])) - position
            if take:
                pieces.append((reading, position - begin, take))
            position += take
            reading += 1
        offsets.append(len(pieces))
    return PackPlan(
        seq_len=seq_len,
        pieces=np.array(pieces, dtype=np.int64).reshape(-1, 3),
        offsets=np.array(offsets, dtype=np.int64),
    )


class Rows:
    """Rows of a plan, read from shards."""

    def __init__(self, plan: PackPlan, shards: TokenShards) -> None:
        self.plan = plan
        self._shards = shards
        self._predicted = plan.predicted

    def __len__(self) -> int:
        return len(self.plan)

    def predicted(self, rows: NDArray[np.int64]) -> int:
        """Tokens that these rows predict together (a row named twice counts twice)."""
        return int(self._predicted[rows].sum())

    def read(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """A row's tokens ``[n] int64`` and, for each, the number of its piece ``[n] int32``."""
        first, last = int(self.plan.offsets[row]), int(self.plan.offsets[row + 1])
        parts: list[NDArray[Any]] = []
        segments: list[NDArray[np.int32]] = []
        for number, (document, start, length) in enumerate(self.plan.pieces[first:last].tolist()):
            parts.append(self._shards.read(document, start, length))
            segments.append(np.full(length, number, dtype=np.int32))
        return np.concatenate(parts).astype(np.int64), np.concatenate(segments)

    def batch(self, rows: NDArray[np.int64], *, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and labels ``[size, seq_len] int64``; short rows and rows beyond ``rows`` are padding.

        Padding has token 0 and the label ``IGNORE``.
        """
        seq_len = self.plan.seq_len
        inputs = np.zeros((size, seq_len), dtype=np.int64)
        labels = np.full((size, seq_len), IGNORE, dtype=np.int64)
        for index, row in enumerate(rows.tolist()):
            tokens, _ = self.read(row)
            inputs[index, : len(tokens) - 1] = tokens[:-1]
            labels[index, : len(tokens) - 1] = tokens[1:]
        return inputs, labels
