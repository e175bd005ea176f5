"""The loader: one global batch whatever the ranks, exact resume, and no wait without an end."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serai.data.loader import Loader, StepBatch, rank_slice, rows_of_step, validation_batches
from serai.data.packing import IGNORE, Rows, plan_rows
from serai.data.shards import TokenShards, write_shards
from serai.errors import TrainingError

SEQ_LEN = 6


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = tmp_path_factory.mktemp("rows")
    documents = [np.arange(start, start + 50, dtype=np.uint32) for start in range(0, 650, 50)]
    records = write_shards(folder, documents, dtype=np.dtype("<u2"))
    shards = TokenShards(folder, records, dtype=np.dtype("<u2"))
    return Rows(plan_rows(shards.documents[:, 2], seq_len=SEQ_LEN, keep_last=True), shards)


def _loader(rows: Rows, *, rank: int = 0, world: int = 1, micro_batch: int = 4, **settings: int) -> Loader:
    values = {"global_batch": 12, "seed": 9, **settings}
    return Loader(rows, fingerprint="pack", micro_batch=micro_batch, rank=rank, world=world, **values)


def _rows_seen(batch: StepBatch) -> NDArray[np.int64]:
    """Inputs of the rows that are no padding, ``[n, seq_len]``."""
    inputs = np.concatenate([inputs for inputs, _ in batch.micro_batches])
    labels = np.concatenate([labels for _, labels in batch.micro_batches])
    real: NDArray[np.bool_] = (labels != IGNORE).any(axis=1)
    return inputs[real]


@settings(deadline=None, max_examples=30)
@given(step=st.integers(0, 10**6), world=st.integers(1, 9), micro_batch=st.integers(1, 13))
def test_the_global_batch_is_the_same_at_any_world_size(
    rows: Rows, step: int, world: int, micro_batch: int
) -> None:
    alone = _loader(rows).read(step)
    ranks = [_loader(rows, rank=r, world=world, micro_batch=micro_batch).read(step) for r in range(world)]
    assert np.array_equal(np.concatenate([_rows_seen(b) for b in ranks]), _rows_seen(alone))
    assert len({len(batch.micro_batches) for batch in ranks}) == 1
    assert {batch.tokens for batch in ranks} == {alone.tokens}
    labels = np.concatenate([labels for b in ranks for _, labels in b.micro_batches])
    assert (labels != IGNORE).sum() == alone.tokens


@given(st.integers(0, 200), st.integers(1, 17))
def test_rank_slices_tile_the_batch_evenly(count: int, world: int) -> None:
    slices = [rank_slice(count, rank=rank, world=world) for rank in range(world)]
    assert [index for s in slices for index in range(s.start, s.stop)] == list(range(count))
    sizes = [s.stop - s.start for s in slices]
    assert max(sizes) - min(sizes) <= 1


def test_each_row_comes_once_an_epoch_and_epochs_differ() -> None:
    drawn = np.concatenate([rows_of_step(step, rows=21, global_batch=4, seed=1) for step in range(21)])
    epochs = drawn.reshape(4, 21)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(21))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4


def test_resume_goes_on_exactly_and_twice(rows: Rows) -> None:
    uninterrupted = _loader(rows)
    expected = [_rows_seen(uninterrupted.next()) for _ in range(9)]
    tokens = uninterrupted.tokens
    first = _loader(rows)
    seen = [_rows_seen(first.next()) for _ in range(3)]
    second = _loader(rows, micro_batch=3)
    second.load_state_dict(first.state_dict())
    seen += [_rows_seen(second.next()) for _ in range(2)]
    third = _loader(rows)
    third.next()
    third.load_state_dict(second.state_dict())
    seen += [_rows_seen(third.next()) for _ in range(4)]
    for mine, theirs in zip(seen, expected, strict=True):
        assert np.array_equal(mine, theirs)
    assert third.step == 9
    assert third.tokens == tokens
    for loader in (uninterrupted, first, second, third):
        loader.close()


def test_the_state_counts_what_was_handed_out_and_not_what_was_read_ahead(rows: Rows) -> None:
    loader = _loader(rows)
    handed = [loader.next() for _ in range(2)]
    state = loader.state_dict()
    assert state["step"] == 2
    assert state["tokens"] == sum(batch.tokens for batch in handed) == 2 * 12 * SEQ_LEN
    loader.close()


@pytest.mark.parametrize("change", [{"global_batch": 16}, {"seed": 10}])
def test_a_position_of_other_data_is_refused(rows: Rows, change: dict[str, int]) -> None:
    with pytest.raises(TrainingError, match="other data") as caught:
        _loader(rows, **change).load_state_dict(_loader(rows).state_dict())
    assert caught.value.code == "S610"


def test_a_failure_of_the_reader_reaches_the_loop(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = _loader(rows)
    monkeypatch.setattr(loader, "read", lambda step: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        loader.next()
    loader.close()


def test_a_reader_that_hangs_is_an_error_within_the_deadline(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(
        rows, fingerprint="pack", global_batch=4, micro_batch=4, seed=1, rank=0, world=1, deadline_s=0.2
    )
    release = threading.Event()
    monkeypatch.setattr(loader, "read", lambda step: release.wait(30))
    started = time.monotonic()
    with pytest.raises(TrainingError, match="no batch came") as caught:
        loader.next()
    assert caught.value.code == "S611"
    assert time.monotonic() - started < 5
    release.set()
    loader.close()


def test_closing_ends_the_thread(rows: Rows) -> None:
    loader = _loader(rows)
    loader.next()
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "serai-loader"]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("limit", [None, 7])
def test_validation_reads_each_chosen_row_on_one_rank_once(rows: Rows, world: int, limit: int | None) -> None:
    per_rank = [
        list(validation_batches(rows, micro_batch=4, rank=rank, world=world, limit=limit))
        for rank in range(world)
    ]
    assert len({len(batches) for batches in per_rank}) == 1
    labels = np.concatenate([labels for batches in per_rank for _, labels in batches])
    predicted = np.sort(labels[labels != IGNORE])
    chosen = np.arange(len(rows)) if limit is None else np.arange(limit) * len(rows) // limit
    expected = np.concatenate([rows.read(int(row))[0][1:] for row in chosen])
    assert np.array_equal(predicted, np.sort(expected))


def test_a_loader_without_rows_is_refused(tmp_path: Path) -> None:
    records = write_shards(tmp_path, [np.arange(3, dtype=np.uint32)], dtype=np.dtype("<u2"))
    shards = TokenShards(tmp_path, records, dtype=np.dtype("<u2"))
    empty = Rows(plan_rows(shards.documents[:, 2], seq_len=10, keep_last=False), shards)
    with pytest.raises(ValueError, match="0 rows"):
        _loader(empty)
