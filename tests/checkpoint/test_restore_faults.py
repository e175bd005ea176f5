"""Restoring while something changes under it, or lies where it does not belong."""

from __future__ import annotations

import os
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import serai
from serai.checkpoint.format import MANIFEST
from serai.checkpoint.ranks import Ranks
from serai.checkpoint.restore import restore
from serai.errors import CheckpointCorrupt
from serai.storage.base import Storage
from serai.storage.local import LocalStorage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Generations of steps 1, 2 and 3."""
    with serai.Checkpointer(tmp_path / "root", keep=serai.Keep(last=3)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.full((3000,), float(step)), "step": step}).wait(timeout=60)
    return tmp_path / "root"


def folder(root: Path, step: int) -> Path:
    (found,) = root.glob(f"step-{step:08d}-*")
    return found


def restored(storage: Storage) -> tuple[Any, dict[str, Any], list[str]]:
    state = {"w": torch.zeros(3000), "step": 0}
    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(2) as pool:
        warnings.simplefilter("always")
        answer = restore(
            state,
            ranks=Ranks(),
            agent=None,
            storages=[("durable", storage)],
            step=None,
            strict=True,
            pool=pool,
        )
    return answer, state, [str(warning.message) for warning in caught]


def whole(state: dict[str, Any], step: int) -> bool:
    return state["step"] == step and torch.equal(state["w"], torch.full((3000,), float(step)))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("file", ["values.json", "shard-00000-of-00001.safetensors", MANIFEST])
def test_a_named_pipe_in_a_files_place_is_no_wait(root: Path, file: str) -> None:
    (folder(root, 3) / file).unlink()
    os.mkfifo(folder(root, 3) / file)
    answer, state, _ = restored(LocalStorage(root))
    assert answer.step == 2
    assert whole(state, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert serai.load(root)["step"] == 2


def test_a_manifest_in_the_wrong_folder_hides_no_intact_generation(root: Path) -> None:
    shutil.copy(folder(root, 3) / MANIFEST, folder(root, 1) / MANIFEST)
    answer, state, _ = restored(LocalStorage(root))
    assert answer.step == 3
    assert whole(state, 3)


def test_an_older_manifest_in_the_newest_folder_is_told(root: Path) -> None:
    shutil.copy(folder(root, 2) / MANIFEST, folder(root, 3) / MANIFEST)
    answer, state, said = restored(LocalStorage(root))
    assert answer.step == 2
    assert whole(state, 2)
    assert any("passed over" in line for line in said)


class Moving(LocalStorage):
    """A live run commits step 3 and removes all else right after the first listing."""

    def __init__(self, root: Path, hidden: Path) -> None:
        super().__init__(root)
        self._hidden = hidden
        self._listed = False

    def read(self, key: str) -> bytes:
        if not self._listed and key.endswith("values.json"):
            self._listed = True
            self._hidden.rename(self.path / self._hidden.name)
            for step in (1, 2):
                shutil.rmtree(folder(self.path, step))
        return super().read(key)


@pytest.mark.filterwarnings("ignore:loading step 3")
def test_retention_of_a_live_run_does_not_pull_the_checkpoint_away(root: Path, tmp_path: Path) -> None:
    for round_, act in enumerate((lambda storage: restored(storage)[1], serai.load)):
        live = tmp_path / f"live{round_}"
        shutil.copytree(root, live)
        hidden = tmp_path / folder(live, 3).name
        folder(live, 3).rename(hidden)
        assert whole(act(Moving(live, hidden)), 3)


class Fickle(LocalStorage):
    """From the second reading on, shards of one step come back changed."""

    def __init__(self, root: Path, steps: tuple[int, ...]) -> None:
        super().__init__(root)
        self._steps = steps
        self._reads: dict[str, int] = {}

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        super().read_into(key, offset, buffer)
        count = self._reads[key] = self._reads.get(key, 0) + 1
        if count > 1 and any(key.startswith(f"step-{step:08d}-") for step in self._steps):
            buffer[-1] ^= 1


def test_bytes_that_change_after_they_verified_are_not_kept(root: Path) -> None:
    answer, state, said = restored(Fickle(root, (3,)))
    assert any("passed over" in line for line in said)
    assert answer.step == 2
    assert whole(state, 2)
    assert any("changed while it was read" in skip.reason for skip in answer.skipped)
    with pytest.raises(CheckpointCorrupt, match="partly overwritten"):
        restored(Fickle(root, (1, 2, 3)))
