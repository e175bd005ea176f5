"""Shards and the pack plan: every token predicted exactly once, any row read alone, damage is seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serai.data.entropy import unigram_entropy
from serai.data.packing import IGNORE, PackPlan, Rows, plan_rows
from serai.data.shards import TokenShards, token_type, verify_file, write_shards
from serai.errors import StorageError

SEVEN = np.dtype("<u2")


def _documents(lengths: list[int]) -> list[NDArray[np.uint32]]:
    """Tokens that count on through all documents, so that a token names its place."""
    ends = np.cumsum(lengths)
    return [np.arange(end - n, end, dtype=np.uint32) for end, n in zip(ends, lengths, strict=True)]


def _rows(folder: Path, lengths: list[int], *, seq_len: int, keep_last: bool, shard_tokens: int) -> Rows:
    records = write_shards(folder, _documents(lengths), dtype=SEVEN, shard_tokens=shard_tokens)
    shards = TokenShards(folder, records, dtype=SEVEN)
    return Rows(plan_rows(shards.documents[:, 2], seq_len=seq_len, keep_last=keep_last), shards)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    seq_len=st.integers(1, 17),
    shard_tokens=st.integers(1, 60),
)
def test_every_token_is_predicted_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, shard_tokens: int
) -> None:
    folder = tmp_path_factory.mktemp("pack")
    rows = _rows(folder, lengths, seq_len=seq_len, keep_last=True, shard_tokens=shard_tokens)
    inputs, labels = rows.batch(np.arange(len(rows)), size=len(rows) + 2)
    assert labels[labels != IGNORE].tolist() == list(range(1, sum(lengths)))
    assert (inputs[labels != IGNORE] + 1 == labels[labels != IGNORE]).all()
    assert (labels[len(rows) :] == IGNORE).all()
    assert rows.predicted(np.arange(len(rows))) == sum(lengths) - 1


def test_without_the_last_row_every_row_is_full(tmp_path: Path) -> None:
    rows = _rows(tmp_path, [10, 3, 9], seq_len=5, keep_last=False, shard_tokens=100)
    assert len(rows) == (22 - 1) // 5
    _, labels = rows.batch(np.arange(len(rows)), size=len(rows))
    assert labels[labels != IGNORE].tolist() == list(range(1, 21))


def test_document_boundaries_are_known_in_each_row(tmp_path: Path) -> None:
    rows = _rows(tmp_path, [4, 2, 7], seq_len=5, keep_last=True, shard_tokens=5)
    tokens, segments = rows.read(0)
    assert tokens.tolist() == [0, 1, 2, 3, 4, 5]
    assert segments.tolist() == [0, 0, 0, 0, 1, 1]
    tokens, segments = rows.read(1)
    assert tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert segments.tolist() == [0, 1, 1, 1, 1, 1]


def test_a_plan_survives_its_files(tmp_path: Path) -> None:
    plan = plan_rows(np.array([5, 8, 1]), seq_len=4, keep_last=True)
    assert plan.save(tmp_path) == ["pieces.npy", "rows.npy"]
    loaded = PackPlan.load(tmp_path, seq_len=4)
    assert np.array_equal(loaded.pieces, plan.pieces)
    assert np.array_equal(loaded.offsets, plan.offsets)
    assert plan.predicted.tolist() == [4, 4, 4, 1]


def test_documents_stay_whole_in_shards(tmp_path: Path) -> None:
    records = write_shards(tmp_path, _documents([6, 3, 20, 2]), dtype=SEVEN, shard_tokens=10)
    assert [r.name for r in records] == [
        "tokens-00000.bin",
        "tokens-00001.bin",
        "tokens-00002.bin",
        "documents.npy",
    ]
    shards = TokenShards(tmp_path, records, dtype=SEVEN)
    assert shards.documents.tolist() == [[0, 0, 6], [0, 6, 3], [1, 0, 20], [2, 0, 2]]
    assert shards.read(3, 1, 1).tolist() == [30]
    assert shards.counts(40).tolist() == [1] * 31 + [0] * 9
    with pytest.raises(IndexError, match="document 1 has 3 tokens"):
        shards.read(1, 2, 2)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_files_are_refused(tmp_path: Path, damage: str) -> None:
    record = write_shards(tmp_path, _documents([50]), dtype=SEVEN)[0]
    verify_file(tmp_path, record)
    path = tmp_path / record.name
    data = bytearray(path.read_bytes())
    data[33] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:-2])
    with pytest.raises(StorageError, match="damaged") as caught:
        verify_file(tmp_path, record)
    assert caught.value.code == "S330"


def test_the_narrowest_token_type_is_taken() -> None:
    assert token_type(65_536) == np.dtype("uint16")
    assert token_type(65_537) == np.dtype("uint32")


def test_unigram_entropy_is_the_smoothed_cross_entropy() -> None:
    train, validation = np.array([3, 1, 0]), np.array([2, 1, 1])
    by_hand = -(2 * np.log(4 / 7) + np.log(2 / 7) + np.log(1 / 7)) / 4
    assert unigram_entropy(train, validation) == pytest.approx(by_hand, rel=1e-15)
    uniform = np.full(50, 10)
    assert unigram_entropy(uniform, uniform) == pytest.approx(np.log(50), rel=1e-12)
