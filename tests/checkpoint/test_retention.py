"""Pruning by hand, pins, the head, and the history."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import serai
from serai.checkpoint.catalog import generations
from serai.checkpoint.history import HISTORY, append_history, read_history
from serai.checkpoint.retention import head, pin, prune, unpin
from serai.errors import CheckpointCorrupt, CheckpointNotFound
from serai.storage.local import LocalStorage


def make(root: Path, *steps: int, keep: int = 99) -> None:
    with serai.Checkpointer(root, keep=serai.Keep(last=keep)) as checkpointer:
        for step in steps:
            state = {"x": torch.arange(100.0) + step}
            checkpointer.save(step, state, metrics={"loss": float(step % 3)}).wait("durable", 60)


def steps(root: Path) -> list[int]:
    return [generation.step for generation in generations(root)]


def damage(root: Path, step: int) -> None:
    (shard,) = root.glob(f"step-{step:08d}-*/shard-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_prune_is_a_dry_run_until_told(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5, 6)
    (tmp_path / "step-00000000-0000-000000").mkdir()
    (tmp_path / "step-00000000-0000-000000" / "shard-00000-of-00001.safetensors").write_bytes(b"half")
    pin(tmp_path, step=1)
    keep = serai.Keep(last=1, every=4, best="loss")
    dry = prune(tmp_path, keep)
    assert dry.dry_run
    assert [g.step for g in dry.removed] == [5, 3, 2]
    assert dry.unfinished == ("step-00000000-0000-000000",)
    assert steps(tmp_path) == [6, 5, 4, 3, 2, 1]
    done = prune(tmp_path, keep, dry_run=False)
    assert [g.step for g in done.removed] == [5, 3, 2]
    assert steps(tmp_path) == [6, 4, 1]
    assert not (tmp_path / "step-00000000-0000-000000").exists()
    assert prune(tmp_path, keep, dry_run=False).removed == ()


def test_prune_never_removes_the_last_one_that_verifies(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)
    report = prune(tmp_path, serai.Keep(last=1), dry_run=False)
    assert [g.step for g in report.removed] == [1]
    assert steps(tmp_path) == [3, 2]
    damage(tmp_path, 2)
    with pytest.raises(CheckpointCorrupt, match="nothing is removed"):
        prune(tmp_path, serai.Keep(last=1), dry_run=False)
    assert steps(tmp_path) == [3, 2]
    with pytest.raises(CheckpointNotFound):
        prune(tmp_path / "empty", serai.Keep())


def test_pins_hold_against_the_runs_own_retention(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    assert pin(tmp_path, step=1)[1] is True
    assert pin(tmp_path, step=1)[1] is False
    make(tmp_path, 3, 4, 5, keep=1)
    assert steps(tmp_path) == [5, 1]
    assert unpin(tmp_path, step=1)[1] is True
    assert unpin(tmp_path, step=1)[1] is False
    make(tmp_path, 6, keep=1)
    assert steps(tmp_path) == [6]
    with pytest.raises(CheckpointNotFound):
        pin(tmp_path, step=77)


def test_head_is_the_newest_that_verifies(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        head(tmp_path)
    make(tmp_path, 1, 2, 3)
    assert head(tmp_path).generation.step == 3
    damage(tmp_path, 3)
    found = head(tmp_path)
    assert found.generation.step == 2
    assert "step-00000003" in found.passed_over[0]
    (manifest,) = tmp_path.glob("step-00000002-*/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-30])
    assert head(tmp_path).generation.step == 1
    damage(tmp_path, 1)
    with pytest.raises(CheckpointCorrupt):
        head(tmp_path)


def test_the_history_has_a_line_for_each_commit_and_removal(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, keep=2)
    lines = list(read_history(tmp_path))
    assert [(line["event"], line["step"]) for line in lines] == [
        ("committed", 1),
        ("committed", 2),
        ("committed", 3),
        ("removed", 1),
    ]
    assert all(line["bytes"] > 400 for line in lines)
    assert all(line["seconds"] > 0 for line in lines if line["event"] == "committed")
    assert lines[-1]["name"] == "step-00000001-0001-000000"
    prune(tmp_path, serai.Keep(last=1), dry_run=False)
    assert [line["step"] for line in read_history(tmp_path)][-1] == 2


def test_a_history_that_cannot_be_written_harms_nothing(tmp_path: Path) -> None:
    (tmp_path / HISTORY).mkdir()
    make(tmp_path, 1)
    assert steps(tmp_path) == [1]
    append_history(LocalStorage(tmp_path), "committed", 1, "x", 1, 1.0)


def test_a_line_cut_short_is_passed_over(tmp_path: Path) -> None:
    append_history(LocalStorage(tmp_path), "committed", 1, "x", 10, 1.0)
    with open(tmp_path / HISTORY, "ab") as stream:
        stream.write(b'{"time": 1.0, "ev\n')
    append_history(LocalStorage(tmp_path), "removed", 1, "x", 10, 0.0)
    assert [line["event"] for line in read_history(tmp_path)] == ["committed", "removed"]
    assert list(read_history(tmp_path / "elsewhere")) == []
