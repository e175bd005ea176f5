"""Exports load where they are meant to, bit for bit, and never half exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from tests.checkpoint.samples import Net, same, save, trained

import serai
from serai.checkpoint import exporting
from serai.checkpoint.exporting import export
from serai.errors import CheckpointCorrupt, CheckpointError, StateMismatch, StorageFull


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path / "root", trained(), 1, 2)
    return tmp_path / "root"


def test_one_file_with_the_models_own_names(root: Path, tmp_path: Path) -> None:
    report = export(root, tmp_path / "m.safetensors", keys=["model"])
    model = serai.load(root)["model"]
    loaded = load_file(tmp_path / "m.safetensors")
    assert report.shared == {"head.weight": "embed.weight"}
    assert same({**loaded, "head.weight": loaded["embed.weight"]}, model)
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    live = Net(9)
    live.load_state_dict(loaded, strict=False)
    assert same(dict(live.state_dict()), model)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_shards_with_an_index(root: Path, tmp_path: Path) -> None:
    ticks: list[tuple[int, int]] = []
    report = export(
        root,
        tmp_path / "hf",
        keys=["model"],
        max_shard_bytes=1100,
        progress=lambda d, t: ticks.append((d, t)),
    )
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_bytes())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 1
    loaded: dict[str, Any] = {}
    for name in files:
        part = load_file(tmp_path / "hf" / name)
        assert {index["weight_map"][key] for key in part} == {name}
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 1100
        loaded |= part
    loaded["head.weight"] = loaded["embed.weight"]
    assert same(loaded, serai.load(root)["model"])
    assert index["metadata"]["total_size"] == report.bytes == ticks[-1][0] == ticks[-1][1]


def test_everything_or_a_part_or_another_step(root: Path, tmp_path: Path) -> None:
    export(root, tmp_path / "all.safetensors", step=1)
    everything = load_file(tmp_path / "all.safetensors")
    old = serai.load(root, step=1)
    assert same(everything["model.gain"], old["model"]["gain"])
    assert same(everything["optimizer.state.gain.exp_avg"], old["optimizer"]["state"]["gain"]["exp_avg"])
    export(root, tmp_path / "part.safetensors", keys=["model.body.0"])
    assert set(load_file(tmp_path / "part.safetensors")) == {"weight", "bias"}
    export(root, tmp_path / "two.safetensors", keys=["model.gain", "model.head"])
    assert set(load_file(tmp_path / "two.safetensors")) == {"model.gain", "model.head.weight"}
    with pytest.raises(StateMismatch, match="modle"):
        export(root, tmp_path / "none.safetensors", keys=["modle"])


def test_two_ranks_become_whole_tensors(
    two_ranks: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    root, expected = two_ranks
    export(root, tmp_path / "w.safetensors")
    loaded = load_file(tmp_path / "w.safetensors")
    for name in ("rows", "columns", "whole"):
        assert same(loaded[f"weights.{name}"], expected[name])
    assert same(loaded["model.plain"], expected["plain"])
    assert loaded["mine.tensor@1"].tolist() == [1.0, 1.0]


def test_torch_save(root: Path, tmp_path: Path) -> None:
    export(root, tmp_path / "all.pt", to="torch")
    assert same(torch.load(tmp_path / "all.pt", weights_only=True), serai.load(root))
    export(root, tmp_path / "model.pt", to="torch", keys=["model"])
    live = Net(9)
    live.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert same(dict(live.state_dict()), serai.load(root)["model"])


def test_torch_save_of_values_that_are_no_tensors(tmp_path: Path) -> None:
    state = {
        "rng": serai.RNG(),
        "odd": {
            "set": {1, 2},
            "frozen": frozenset({3}),
            "bytes": b"x",
            "tuple": (1, None),
            "c": 1j,
            "nan": 0.5,
        },
        "t": {"complex128": torch.ones(2, dtype=torch.complex128)},
    }
    with serai.Checkpointer(tmp_path / "root") as checkpointer:
        checkpointer.save(1, state)
    export(tmp_path / "root", tmp_path / "x.pt", to="torch")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert loaded["odd"] == {**state["odd"], "frozen": {3}}
    assert same(loaded["t"], state["t"])
    expected = torch.rand(3)
    serai.RNG().load_state_dict(loaded["rng"])
    assert same(torch.rand(3), expected)
    with pytest.raises(CheckpointError, match="complex128") as caught:
        export(tmp_path / "root", tmp_path / "x.safetensors")
    assert caught.value.code == "S434"


@pytest.mark.filterwarnings("ignore:.*torch.distributed is")
def test_dcp(root: Path, tmp_path: Path) -> None:
    export(root, tmp_path / "dcp", to="dcp")
    state = serai.load(root)
    empty = {"model": {key: torch.zeros_like(value) for key, value in state["model"].items()}}
    dcp.load(empty, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(empty["model"], state["model"])


def test_nothing_is_overwritten(root: Path, tmp_path: Path) -> None:
    for target, options in (
        ("m.safetensors", {}),
        ("folder", {}),
        ("x.pt", {"to": "torch"}),
        ("dcp", {"to": "dcp"}),
    ):
        export(root, tmp_path / target, **options)
        with pytest.raises(CheckpointError) as caught:
            export(root, tmp_path / target, **options)
        assert caught.value.code == "S433", target
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    export(root, tmp_path / "hf", keys=["model"])
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]


def test_damage_leaves_nothing_behind(root: Path, tmp_path: Path) -> None:
    (shard,) = root.glob("step-00000002-*/shard-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    for target, options in (
        ("m.safetensors", {}),
        ("f", {}),
        ("x.pt", {"to": "torch"}),
        ("d", {"to": "dcp"}),
    ):
        with pytest.raises(CheckpointCorrupt):
            export(root, tmp_path / "out" / target, **options)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_is_said_before_anything_is_written(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_HEADROOM", 1 << 60)
    with pytest.raises(StorageFull, match="are free"):
        export(root, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


def test_limits_without_meaning(root: Path, tmp_path: Path) -> None:
    for target, to in (("m.safetensors", "safetensors"), ("x.pt", "torch")):
        with pytest.raises(CheckpointError) as caught:
            export(root, tmp_path / target, to=to, max_shard_bytes=5)
        assert caught.value.code == "S438"
