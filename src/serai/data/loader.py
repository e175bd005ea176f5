"""The loader: the batch of step ``k`` is a pure function of (plan, seed, ``k``).

Rows are drawn without replacement, in a new order each epoch, and the global batch is the same whatever
the number of ranks: each rank reads its slice of it. So the whole position is one integer.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.data.packing import Rows
from serai.data.permutation import permute
from serai.errors import TrainingError

__all__ = ["Loader", "StepBatch", "rank_slice", "rows_of_step", "validation_batches"]

MicroBatch = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Inputs and labels, each ``[micro_batch, seq_len] int64``."""


def rows_of_step(step: int, *, rows: int, global_batch: int, seed: int) -> NDArray[np.int64]:
    """The rows of the global batch of step ``step`` (counted from 0): ``[global_batch] int64``."""
    positions = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
    drawn = np.empty_like(positions)
    for epoch in range(int(positions[0]) // rows, int(positions[-1]) // rows + 1):
        inside = positions // rows == epoch
        drawn[inside] = permute(positions[inside] % rows, size=rows, seed=seed, epoch=epoch)
    return drawn


def rank_slice(count: int, *, rank: int, world: int) -> slice:
    """A rank's contiguous share of ``count`` rows; shares differ by one row at most."""
    return slice(count * rank // world, count * (rank + 1) // world)


@dataclass(frozen=True)
class StepBatch:
    """What one rank needs for one step.

    Attributes:
        step: counted from 0.
        micro_batches: the rank's share, as many on every rank, padded with rows that predict nothing.
        tokens: predicted tokens of the *global* batch.
        wait_s: seconds that the caller waited for it.
    """

    step: int
    micro_batches: list[MicroBatch]
    tokens: int
    wait_s: float


class Loader:
    """Batches of one rank, read ahead by a thread.

    Args:
        rows: the training rows.
        fingerprint: of the pack (``Pack.fingerprint``).
        global_batch: rows of one step over all ranks.
        micro_batch: rows that one rank puts through the model at once.
        ahead: steps that are read ahead.
        deadline_s: seconds after which a batch that does not come is an error.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        fingerprint: str,
        global_batch: int,
        micro_batch: int,
        seed: int,
        rank: int,
        world: int,
        ahead: int = 2,
        deadline_s: float = 120.0,
    ) -> None:
        if len(rows) == 0 or not 0 <= rank < world:
            raise ValueError(f"a loader needs rows and a rank: {len(rows)} rows, rank {rank} of {world}")
        self._rows = rows
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._seed = seed
        self._rank = rank
        self._world = world
        self._ahead = ahead
        self._deadline_s = deadline_s
        self._step = 0
        self._tokens = 0
        self._reader: _Reader | None = None
        # World size and micro batch are left out on purpose: they do not change what is read.
        self.fingerprint = hashlib.sha256(f"{fingerprint}:{global_batch}:{seed}".encode()).hexdigest()

    @property
    def step(self) -> int:
        """Batches handed out so far."""
        return self._step

    @property
    def tokens(self) -> int:
        """Tokens predicted by the global batches handed out so far."""
        return self._tokens

    def read(self, step: int) -> StepBatch:
        """The batch of any step, without moving."""
        rows = rows_of_step(step, rows=len(self._rows), global_batch=self._global_batch, seed=self._seed)
        mine = rows[rank_slice(len(rows), rank=self._rank, world=self._world)]
        largest = -(-len(rows) // self._world)
        size = self._micro_batch
        return StepBatch(
            step=step,
            micro_batches=[
                self._rows.batch(mine[start : start + size], size=min(size, largest))
                for start in range(0, largest, size)
            ],
            tokens=self._rows.predicted(rows),
            wait_s=0.0,
        )

    def next(self) -> StepBatch:
        """The batch of the next step.

        Raises:
            TrainingError: it did not come within the deadline (S611).
        """
        if self._reader is None:
            self._reader = _Reader(self.read, start=self._step, ahead=self._ahead)
        started = time.perf_counter()
        batch = self._reader.get(self._deadline_s)
        self._step = batch.step + 1
        self._tokens += batch.tokens
        return StepBatch(batch.step, batch.micro_batches, batch.tokens, time.perf_counter() - started)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "tokens": self._tokens, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            TrainingError: it was taken on other data, with another global batch or another seed (S610).
        """
        if state["fingerprint"] != self.fingerprint:
            raise TrainingError(
                "the checkpoint's data position belongs to other data, another global batch or another seed",
                code="S610",
                where=f"loader fingerprint {str(state['fingerprint'])[:16]}…",
                expected=f"{self.fingerprint[:16]}…: the same text, tokenizer, seq_len, global batch and seed",
                next_step="set `data`, `train.seed` and the batch sizes back, or start a run with another name",
            )
        self.close()
        self._step = int(state["step"])
        self._tokens = int(state["tokens"])

    def close(self) -> None:
        """Stop reading ahead. The loader can be used again."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _Reader:
    """A thread that reads steps in order into a short queue; its failure is raised by ``get``."""

    def __init__(self, read: Callable[[int], StepBatch], *, start: int, ahead: int) -> None:
        self._read = read
        self._queue: queue.Queue[StepBatch | BaseException] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(start,), name="serai-loader", daemon=True)
        self._thread.start()

    def get(self, deadline_s: float) -> StepBatch:
        try:
            item = self._queue.get(timeout=deadline_s)
        except queue.Empty:
            raise TrainingError(
                f"no batch came within {deadline_s:.0f} s",
                code="S611",
                expected="training data that can be read faster than they are used",
                next_step="look at the disk under the workspace's cache (`serai doctor` measures it)",
            ) from None
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._stop.set()
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        # The thread looks at the event at least every 0.1 s; one stuck in a read is a daemon and may stay.
        self._thread.join(timeout=5.0)

    def _run(self, step: int) -> None:
        while not self._stop.is_set():
            try:
                item: StepBatch | BaseException = self._read(step)
            except BaseException as error:
                item = error
            while not self._stop.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
            step += 1


def validation_batches(
    rows: Rows, *, micro_batch: int, rank: int, world: int, limit: int | None = None
) -> Iterator[MicroBatch]:
    """A rank's share of the validation rows, as many batches on every rank, each row on one rank once.

    Args:
        limit: at most so many rows over all ranks, spread evenly over the documents; the same each time.
    """
    count = len(rows) if limit is None else min(limit, len(rows))
    chosen = np.arange(count, dtype=np.int64) * len(rows) // max(count, 1)
    mine = chosen[rank::world]
    largest = -(-count // world)
    for start in range(0, largest, micro_batch):
        yield rows.batch(mine[start : start + micro_batch], size=min(micro_batch, largest))
