"""Copies are whole, verified, repeatable, and never half visible."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import serai
from serai.checkpoint.catalog import generations, verify
from serai.checkpoint.copying import copy
from serai.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, StorageError
from serai.storage.local import LocalStorage


def make(root: Path, *steps: int, base: float = 0.0) -> None:
    with serai.Checkpointer(root, keep=serai.Keep(last=9)) as checkpointer:
        for step in steps:
            state = {"x": torch.arange(3000.0) + step + base, "n": step}
            checkpointer.save(step, state).wait("durable", 60)


def test_the_newest_or_one_or_all(tmp_path: Path) -> None:
    make(tmp_path / "a", 1, 2, 3)
    first = copy(tmp_path / "a", tmp_path / "b", step=2)
    assert ([c.step for c in first.generations], first.newest) == ([2], 2)
    assert serai.load(tmp_path / "b")["n"] == 2
    every = copy(tmp_path / "a", tmp_path / "b", every=True)
    assert [(c.step, c.already_there) for c in every.generations] == [(1, False), (2, True), (3, False)]
    assert every.newest == 3
    assert [g.step for g in generations(tmp_path / "b")] == [3, 2, 1]
    assert verify(tmp_path / "b").ok
    assert copy(tmp_path / "a", tmp_path / "b", every=True).bytes == 0
    for side in ("step-00000003-0001-000002/manifest.json", "step-00000001-0001-000000/values.json"):
        assert (tmp_path / "a" / side).read_bytes() == (tmp_path / "b" / side).read_bytes()


def test_a_run_in_the_copy_comes_after_it(tmp_path: Path) -> None:
    make(tmp_path / "a", 5)
    make(tmp_path / "a", 6)  # attempt 2
    copy(tmp_path / "a", tmp_path / "b")
    make(tmp_path / "b", 2)
    assert [(g.step, g.attempt) for g in generations(tmp_path / "b")] == [(2, 3), (6, 2)]
    # Also where somebody copied folders without attempts/.
    shutil.copytree(tmp_path / "a", tmp_path / "c", ignore=shutil.ignore_patterns("attempts"))
    make(tmp_path / "c", 1)
    assert generations(tmp_path / "c")[0].step == 1


class Breaking(LocalStorage):
    """A target whose disk goes away after some uploads."""

    def __init__(self, path: Path, puts: int) -> None:
        super().__init__(path)
        self.left = puts

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.left -= 1
        if self.left < 0:
            raise StorageError("gone")
        super().put(key, data)


def test_an_interrupted_copy_is_no_checkpoint_and_goes_on(tmp_path: Path) -> None:
    make(tmp_path / "a", 1)
    with pytest.raises(StorageError, match="gone"):
        copy(tmp_path / "a", Breaking(tmp_path / "b", 0))
    assert generations(tmp_path / "b") == []
    report = copy(tmp_path / "a", tmp_path / "b")
    assert report.generations[0].present > 12000  # the shard was there
    assert verify(tmp_path / "b").ok


def test_a_damaged_half_copy_is_sent_again(tmp_path: Path) -> None:
    make(tmp_path / "a", 1)
    copy(tmp_path / "a", tmp_path / "b")
    (shard,) = (tmp_path / "b").glob("*/shard-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert not verify(tmp_path / "b").ok
    assert copy(tmp_path / "a", tmp_path / "b").bytes > 12000
    assert verify(tmp_path / "b").ok


class Lying(LocalStorage):
    """A disk that loses a bit of what it is given."""

    def upload(self, key: str, chunks: object, size: int, *, stable: bool = False) -> None:
        super().upload(key, chunks, size, stable=stable)  # type: ignore[arg-type]
        path = self.path / key
        data = bytearray(path.read_bytes())
        data[-9] ^= 4
        path.write_bytes(data)


def test_a_target_that_loses_bits_gets_no_manifest(tmp_path: Path) -> None:
    make(tmp_path / "a", 1)
    with pytest.raises(CheckpointError, match="does not read back") as caught:
        copy(tmp_path / "a", Lying(tmp_path / "b"))
    assert caught.value.code == "S430"
    assert generations(tmp_path / "b") == []


def test_a_damaged_source_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "a", 1)
    (shard,) = (tmp_path / "a").glob("*/shard-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointCorrupt):
        copy(tmp_path / "a", tmp_path / "b")
    assert generations(tmp_path / "b") == []


def test_what_cannot_be_copied(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        copy(tmp_path / "nothing", tmp_path / "b")
    make(tmp_path / "a", 1)
    with pytest.raises(CheckpointNotFound, match="step 7"):
        copy(tmp_path / "a", tmp_path / "b", step=7)
    with pytest.raises(CheckpointError) as same:
        copy(tmp_path / "a", tmp_path / "a")
    assert same.value.code == "S432"
    make(tmp_path / "other", 1, base=0.5)
    copy(tmp_path / "other", tmp_path / "b")
    with pytest.raises(CheckpointError) as other:
        copy(tmp_path / "a", tmp_path / "b")
    assert other.value.code == "S431"
    assert serai.load(tmp_path / "b")["x"][0].item() == 1.5


def test_a_live_run_in_the_target_is_not_overtaken(tmp_path: Path) -> None:
    make(tmp_path / "a", 1)
    make(tmp_path / "a", 2)  # attempt 2
    with serai.Checkpointer(tmp_path / "b") as live:  # attempt 1
        with pytest.raises(CheckpointError) as caught:
            copy(tmp_path / "a", tmp_path / "b", every=True)
        assert caught.value.code == "S435"
        copy(tmp_path / "a", tmp_path / "b", step=1)
        live.save(5, {"n": 5}).wait("durable", 60)
    copy(tmp_path / "a", tmp_path / "b", step=2)
    assert generations(tmp_path / "b")[0].step == 2
