"""What others wrote restores into live models and optimizers, or is refused with the reason."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model
from tests.checkpoint.samples import Net, same, step, trained
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import serai
from serai.checkpoint.catalog import generations, verify
from serai.checkpoint.importing import detect, import_checkpoint
from serai.errors import CheckpointCorrupt, CheckpointError, SeraiError, StateMismatch, UnsafeObject


class Evil:
    """Runs something when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def restored(root: Path, *names: str, seed: int = 9) -> dict[str, Any]:
    """A fresh state with what the root holds."""
    state = {name: value for name, value in trained(seed, steps=1).items() if name in names}
    with serai.Checkpointer(root) as checkpointer:
        assert checkpointer.restore(state) is not None
    return state


def test_safetensors_with_tied_weights_left_out(tmp_path: Path) -> None:
    model = trained(1)["model"]
    weights = {k: v for k, v in model.state_dict().items() if k != "head.weight"}
    save_file(weights, tmp_path / "plain.safetensors")  # as Hugging Face leaves it
    save_model(
        model, str(tmp_path / "named.safetensors")
    )  # as safetensors does, with the tie in the metadata
    for file in ("plain", "named"):
        report = import_checkpoint(tmp_path / f"{file}.safetensors", tmp_path / file, step=12)
        assert (report.format, report.step, report.names, report.tensors) == (
            "safetensors",
            12,
            ("model",),
            11,
        )
        assert verify(tmp_path / file).ok
        live = restored(tmp_path / file, "model")["model"]
        assert same(dict(live.state_dict()), dict(model.state_dict()))
        assert live.head.weight is live.embed.weight
    assert same(serai.load(tmp_path / "named")["model"], dict(model.state_dict()))


def test_a_sharded_hugging_face_folder_under_another_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = [{"a": torch.randn(3)}, {"b.c": torch.randn(2, 2)}]
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = {}
    for i, part in enumerate(parts, start=1):
        save_file(part, folder / f"model-{i:05d}-of-00002.safetensors")
        names |= dict.fromkeys(part, f"model-{i:05d}-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    import_checkpoint(folder, tmp_path / "root", name="net")
    assert same(serai.load(tmp_path / "root"), {"net": parts[0] | parts[1]})
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointCorrupt, match="model-00002") as caught:
        import_checkpoint(folder, tmp_path / "root")
    assert caught.value.code == "S436"
    assert len(generations(tmp_path / "root")) == 1


def save_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, path: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)


@pytest.mark.parametrize("legacy", [False, True])
def test_torch_save_with_numbered_parameters(tmp_path: Path, legacy: bool) -> None:
    saved = trained(1)
    content = {
        "state_dict": saved["model"].state_dict(),
        "optimizer": saved["optimizer"].state_dict(),
        "progress": {"seen": [3, None], "loss": 0.25},
    }
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    report = import_checkpoint(tmp_path / "x.pt", tmp_path / "root", step=5, rename={"state_dict": "model"})
    assert any("all shapes agree" in note for note in report.notes)
    live = restored(tmp_path / "root", "model", "optimizer", "progress")
    assert same(dict(live["model"].state_dict()), dict(saved["model"].state_dict()))
    assert same(live["optimizer"].state_dict(), saved["optimizer"].state_dict())
    assert live["progress"] == content["progress"]
    torch.manual_seed(3)
    step(live["model"], live["optimizer"])
    torch.manual_seed(3)
    step(saved["model"], saved["optimizer"])
    assert same(dict(live["model"].state_dict()), dict(saved["model"].state_dict()))


def test_names_in_the_optimizer_are_taken_in_any_order(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    backwards = list(reversed(list(model.named_parameters())))
    optimizer = torch.optim.AdamW([{"params": backwards[:2]}, {"params": backwards[2:]}])
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    save_optimizer(optimizer, model, tmp_path / "x.pt")
    import_checkpoint(tmp_path / "x.pt", tmp_path / "root")
    state = serai.load(tmp_path / "root")["optimizer"]["state"]
    for name, parameter in model.named_parameters():
        assert same(state[name]["exp_avg"], optimizer.state[parameter]["exp_avg"]), name


def test_numbers_that_could_be_anybodys_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    parameters = list(model.parameters())
    two_groups = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])
    backwards = torch.optim.AdamW(parameters[::-1])
    some = torch.optim.AdamW(parameters[:2])
    for optimizer in (two_groups, backwards, some):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        path = tmp_path / "x.pt"
        save_optimizer(optimizer, model, path)
        with pytest.raises(CheckpointError) as caught:
            import_checkpoint(path, tmp_path / "root")
        assert caught.value.code == "S439"
    assert generations(tmp_path / "root") == []
    import_checkpoint(path, tmp_path / "root", keys=["model"])
    assert set(serai.load(tmp_path / "root")) == {"model"}


def test_pickles_are_refused_and_never_run(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "x": Evil(tmp_path / "mark")}, tmp_path / "x.pt")
    with pytest.raises(UnsafeObject, match="mkdir") as caught:
        import_checkpoint(tmp_path / "x.pt", tmp_path / "root")
    assert caught.value.code == "S437"
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "mark")))
    with pytest.raises(UnsafeObject) as caught:
        import_checkpoint(folder, tmp_path / "root")
    assert caught.value.code == "S437"
    assert not (tmp_path / "mark").exists()


@pytest.mark.filterwarnings("ignore:.*torch.distributed is")
def test_dcp(tmp_path: Path) -> None:
    saved = trained(1)
    model, optimizer = get_state_dict(saved["model"], saved["optimizer"])
    content = {"model": model, "optimizer": optimizer, "progress": {"seen": [4, None], "loss": 0.1}}
    dcp.save(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    report = import_checkpoint(tmp_path / "dcp", tmp_path / "root", step=7)
    assert (report.format, set(report.names)) == ("dcp", {"model", "optimizer", "progress"})
    live = restored(tmp_path / "root", "model", "optimizer", "progress")
    assert same(dict(live["model"].state_dict()), dict(saved["model"].state_dict()))
    ours, theirs = live["optimizer"].state_dict(), saved["optimizer"].state_dict()
    assert same(ours["state"], theirs["state"])
    assert ours["param_groups"] == theirs["param_groups"]
    assert live["progress"] == content["progress"]
    (tmp_path / "dcp" / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(CheckpointCorrupt):
        import_checkpoint(tmp_path / "dcp", tmp_path / "root", step=8)
    assert [g.step for g in generations(tmp_path / "root")] == [7]


@pytest.mark.filterwarnings("ignore:.*torch.distributed is")
def test_a_pickle_inside_dcp_is_never_run(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "x": Evil(tmp_path / "mark")}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UnsafeObject, match="x of the DCP folder") as caught:
        import_checkpoint(tmp_path / "dcp", tmp_path / "root")
    assert caught.value.code == "S437"
    assert not (tmp_path / "mark").exists()
    import_checkpoint(tmp_path / "dcp", tmp_path / "root", keys=["w"])
    assert serai.load(tmp_path / "root")["w"].tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:.*torch.distributed is")
def test_a_dcp_folder_that_points_outside(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 100)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafeObject, match="outside"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "root")


def test_deepspeed_universal(tmp_path: Path) -> None:
    """The layout of DeepSpeed's ds_to_universal: a folder a parameter, ``{"param": tensor}`` in each file."""
    model = Net(1).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        step(model, optimizer)
    zero = tmp_path / "univ" / "zero"
    for name, parameter in model.named_parameters():
        (zero / name).mkdir(parents=True)
        moments = optimizer.state[parameter]
        torch.save({"param": parameter.detach().clone(), "cat_dim": 0}, zero / name / "fp32.pt")
        for key in ("exp_avg", "exp_avg_sq"):
            torch.save({"param": moments[key].float(), "cat_dim": 0}, zero / name / f"{key}.pt")
        torch.save(2, zero / name / "step.pt")
    module = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save({"module": module, "buffer_names": []}, tmp_path / "univ" / "mp_rank_00_model_states.pt")
    report = import_checkpoint(tmp_path / "univ", tmp_path / "root", step=2)
    assert (report.format, report.names) == ("deepspeed", ("model", "optimizer"))
    other = Net(5).float()
    live = torch.optim.AdamW(other.parameters(), lr=0.5)
    with serai.Checkpointer(tmp_path / "root") as checkpointer:
        assert checkpointer.restore({"model": other, "optimizer": live}) is not None
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert same(live.state[mine][key], optimizer.state[theirs][key]), key
    assert live.param_groups[0]["lr"] == 0.5


HEADER = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def safetensors_of(header: Any, data: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 1 << 40) + b"{}",
        safetensors_of(b"[]"),
        safetensors_of(b"{nonsense"),
        safetensors_of({"w": {}}),
        safetensors_of({"w": {**HEADER["w"], "data_offsets": [0, 1 << 40]}}),
        safetensors_of({"w": {**HEADER["w"], "data_offsets": [-8, 0]}}),
        safetensors_of({"w": {**HEADER["w"], "shape": [3]}}),
        safetensors_of({"w": {**HEADER["w"], "shape": [True, 2]}}),
        safetensors_of({"w": {**HEADER["w"], "dtype": "PICKLE"}}),
        safetensors_of(HEADER, b"\0" * 7),
    ],
    ids=range(12),
)
def test_a_strangers_safetensors_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        import_checkpoint(tmp_path / "x.safetensors", tmp_path / "root")
    assert caught.value.code in ("S434", "S436")
    assert generations(tmp_path / "root") == []


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", ".."])
def test_an_index_names_only_its_own_folder(tmp_path: Path, name: str) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(SeraiError) as caught:
        import_checkpoint(folder, tmp_path / "root", kind="safetensors")
    assert caught.value.code == "S436"


def test_what_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        detect(tmp_path)
    assert caught.value.code == "S436"
    (tmp_path / "garbage.pt").write_bytes(b"garbage")
    for content in (b"garbage", b"PK\x03\x04 garbage", pickle.dumps({"a": 1})):
        (tmp_path / "garbage.pt").write_bytes(content)
        with pytest.raises(SeraiError) as caught:
            import_checkpoint(tmp_path / "garbage.pt", tmp_path / "root")
        assert caught.value.code in ("S436", "S437")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    with pytest.raises(CheckpointError, match="holds a Tensor"):
        import_checkpoint(tmp_path / "tensor.pt", tmp_path / "root")
    save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(StateMismatch):
        import_checkpoint(tmp_path / "x.safetensors", tmp_path / "root", keys=["optimizer"])


def test_a_live_runs_root_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors")
    with serai.Checkpointer(tmp_path / "root") as checkpointer:
        with pytest.raises(CheckpointError) as caught:
            import_checkpoint(tmp_path / "x.safetensors", tmp_path / "root")
        assert caught.value.code == "S435"
        assert str(os.getpid()) in caught.value.message
        checkpointer.save(1, {"n": 1})
    import_checkpoint(tmp_path / "x.safetensors", tmp_path / "root", step=2)
    assert [g.step for g in generations(tmp_path / "root")] == [2, 1]


def test_a_flat_state_dict_is_the_model(tmp_path: Path) -> None:
    model = Net(1)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    import_checkpoint(tmp_path / "x.pt", tmp_path / "root")
    live = restored(tmp_path / "root", "model")["model"]
    assert same(dict(live.state_dict()), dict(model.state_dict()))
