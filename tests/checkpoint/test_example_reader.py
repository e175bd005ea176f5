"""The reader in examples/ needs no serai and no torch, and reads every byte that serai reads."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoint.samples import raw, save, trained

import serai
from serai.checkpoint.importing import import_checkpoint

READER = Path(__file__).parents[2] / "examples" / "read_checkpoint.py"


def read(root: Path, step: int | None = None) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    found: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = runpy.run_path(str(READER))["read"](
        root, step
    )
    return found


def leaves(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {}
    for key, item in items:
        found |= leaves(item, f"{path}.{key}" if path else str(key))
    return found


def test_it_is_short() -> None:
    assert len(READER.read_text().splitlines()) <= 60


def test_it_imports_neither_serai_nor_torch(tmp_path: Path) -> None:
    save_file({"w": torch.arange(3.0)}, tmp_path / "x.safetensors")
    import_checkpoint(tmp_path / "x.safetensors", tmp_path / "root", step=5)
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
        "print(sorted({'serai', 'torch', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(READER), str(tmp_path / "root"), "5"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert done.stdout.split() == ["model.w", "float32", "(3,)", "[]"]


def test_one_process(tmp_path: Path) -> None:
    state = trained(1)
    state["odd"] = {
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "bool": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "complex128": torch.tensor([[1 + 2j]], dtype=torch.complex128),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        **{str(kind): torch.tensor([3], dtype=kind) for kind in (torch.int8, torch.uint16, torch.uint64)},
    }
    save(tmp_path, state, 1, 2)
    for step in (1, None):
        manifest, values, tensors = read(tmp_path, step)
        expected = leaves(serai.load(tmp_path, step=step))
        assert expected.pop("model.head.weight") is not None  # tied: stored under the first name
        assert values["model"]["same"]["$module"]["aliases"] == {"head.weight": "model.embed.weight"}
        assert set(tensors) == set(expected)
        for name, tensor in expected.items():
            assert tensors[name].tobytes() == raw(tensor), name
            if str(tensor.dtype).removeprefix("torch.") == str(tensors[name].dtype):
                assert tensors[name].shape == tuple(tensor.shape)
        assert manifest["step"] == (step or 2)
    assert np.isclose(tensors["odd.scalar"], 2.5)


def test_two_ranks(two_ranks: tuple[Path, dict[str, torch.Tensor]]) -> None:
    root, _ = two_ranks
    _, values, tensors = read(root)
    for rank in (0, 1):
        for name, tensor in leaves(serai.load(root, rank=rank)).items():
            stored = f"{name}@{rank}" if name == "mine.tensor" else name
            assert tensors[stored].tobytes() == raw(tensor), name
    assert [tree["rank"] for tree in values["mine"]["ranks"]] == [0, 1]


def test_damage_is_seen(tmp_path: Path) -> None:
    save_file({"w": torch.arange(3.0)}, tmp_path / "x.safetensors")
    import_checkpoint(tmp_path / "x.safetensors", tmp_path / "root", step=5)
    (shard,) = (tmp_path / "root").glob("step-*/shard-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ValueError, match=r"shard-00000-of-00001\.safetensors@0 does not verify"):
        read(tmp_path / "root")
