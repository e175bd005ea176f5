"""Save and restore in one process: every kind of tensor and value, in place, verified, or not at all."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import serai
from serai.checkpoint.catalog import generations
from serai.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    SpecError,
    StateMismatch,
    UnsafeObject,
)


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4, bias=False))


def trained(seed: int, steps: int = 3) -> dict[str, Any]:
    model = small_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "progress": {"epoch": seed, "seen": [seed, None]},
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def raw(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.is_quantized:
        return repr(tensor).encode() + raw(tensor.int_repr())
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def save_one(root: Path, state: dict[str, Any], step: int = 1) -> None:
    with serai.Checkpointer(root) as checkpointer:
        checkpointer.save(step, state)


ODD_TENSORS = {
    "nan_payload": torch.tensor([0x7FC0DEAD, 0x7F800001], dtype=torch.int32).view(torch.float32),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "complex128": torch.tensor([[1 + 2j]], dtype=torch.complex128),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "bf16": torch.randn(3).bfloat16(),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
    "float8_fnuz": torch.randn(5).to(torch.float8_e5m2fnuz),
    "uint64": torch.tensor([2**63, 1], dtype=torch.uint64),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "strided": torch.arange(20)[::3],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "päth/with.dots and ünïcode": torch.arange(3),
}


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch will drop them; checkpoints that hold them stay readable
    QUANTISED = {
        "tensor": torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 3, torch.qint8),
        "channel": torch.quantize_per_channel(
            torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
        ),
    }


@pytest.mark.filterwarnings("ignore:.*quantized")
def test_quantised_tensors_keep_integers_and_scales(tmp_path: Path) -> None:
    save_one(tmp_path, {"q": dict(QUANTISED)})
    live = {
        "tensor": torch.quantize_per_tensor(torch.zeros(4, 4), 1.0, 0, torch.qint8),
        "channel": torch.quantize_per_channel(
            torch.zeros(2, 3), torch.tensor([1.0, 1.0]), torch.tensor([0, 0]), 0, torch.quint8
        ),
    }
    serai.Checkpointer(tmp_path).restore({"q": live})
    loaded = serai.load(tmp_path)["q"]
    for name, tensor in QUANTISED.items():
        assert same(loaded[name], tensor), name
        assert same(live[name], tensor), name


def test_everything_comes_back_in_place(tmp_path: Path) -> None:
    saved = trained(1)
    saved["odd"] = {
        name: tensor.clone() if name != "expanded" else tensor for name, tensor in ODD_TENSORS.items()
    }
    saved["list"] = [torch.arange(3), {"deep": (torch.ones(2), 5)}]
    saved["number"] = 7
    save_one(tmp_path, saved, 41)
    live = trained(2)
    live["odd"] = {name: torch.zeros_like(tensor) for name, tensor in ODD_TENSORS.items()}
    live["odd"]["expanded"] = torch.zeros(4, 3)
    live["list"] = [torch.zeros(3, dtype=torch.int64), {"deep": (torch.zeros(2), 0)}]
    live["number"] = 0
    weight, odd = live["model"][0].weight, live["odd"]["scalar"]
    restored = serai.Checkpointer(tmp_path).restore(live)
    assert restored is not None
    assert restored.step == 41
    assert live["model"][0].weight is weight
    assert live["odd"]["scalar"] is odd
    for name in ODD_TENSORS:
        assert same(live["odd"][name], saved["odd"][name]), name
    assert same(live["model"].state_dict(), saved["model"].state_dict())
    assert same(live["optimizer"].state_dict(), saved["optimizer"].state_dict())
    assert live["scheduler"].state_dict() == saved["scheduler"].state_dict()
    assert live["progress"] == {"epoch": 1, "seen": [1, None]}
    assert same(live["list"], saved["list"])
    assert live["number"] == 7


def test_load_gives_plain_nested_dicts_with_the_saved_names(tmp_path: Path) -> None:
    saved = trained(1)
    saved["odd"] = dict(ODD_TENSORS)
    save_one(tmp_path, saved, 5)
    loaded = serai.load(tmp_path)
    assert set(loaded) == set(saved)
    assert same(loaded["model"], dict(saved["model"].state_dict()))
    assert set(loaded["optimizer"]["state"]) == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight"}
    assert loaded["optimizer"]["param_groups"][0]["params"] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "3.weight",
    ]
    assert loaded["progress"] == {"epoch": 1, "seen": [1, None]}
    for name, tensor in ODD_TENSORS.items():
        assert same(loaded["odd"][name], tensor), name
    some = serai.load(tmp_path, keys=["model.0.weight", "progress"])
    assert set(some) == {"model", "progress"}
    assert set(some["model"]) == {"0.weight"}
    with pytest.raises(StateMismatch, match=r"0\.weights"):
        serai.load(tmp_path, keys=["model.0.weights"])


def test_shards_are_plain_safetensors(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0).reshape(2, 3), "flag": torch.tensor([True])}
    save_one(tmp_path, state)
    (shard,) = tmp_path.glob("step-*/shard-00000-of-00001.safetensors")
    assert same(load_file(shard), state)


def test_names_that_join_alike_stay_apart(tmp_path: Path) -> None:
    save_one(tmp_path, {"s": {"a.b": torch.tensor([1]), "a": {"b": torch.tensor([2])}}})
    live = {"s": {"a": {"b": torch.tensor([0])}, "a.b": torch.tensor([0])}}
    assert serai.Checkpointer(tmp_path).restore(live) is not None
    assert live["s"]["a.b"].item() == 1
    assert live["s"]["a"]["b"].item() == 2


def test_tied_weights_are_stored_once_and_restored_tied_or_not(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self, tie: bool) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 32)
            self.head = nn.Linear(32, 64, bias=False)
            if tie:
                self.head.weight = self.embed.weight

    saved = Tied(True)
    save_one(tmp_path, {"model": saved})
    assert generations(tmp_path)[0].tensors == 1
    for tie in (True, False):
        live = Tied(tie)
        serai.Checkpointer(tmp_path).restore({"model": live})
        assert torch.equal(live.head.weight, saved.embed.weight)
        assert torch.equal(live.embed.weight, saved.embed.weight)
    assert set(serai.load(tmp_path)["model"]) == {"embed.weight", "head.weight"}


def test_a_fresh_optimizer_gets_its_state_and_the_next_steps_are_equal(tmp_path: Path) -> None:
    saved = trained(3)
    save_one(tmp_path, saved)
    live = trained(4, steps=0)
    serai.Checkpointer(tmp_path).restore(live)
    for state in (saved, live):
        torch.manual_seed(9)
        state["optimizer"].zero_grad()
        state["model"](torch.randn(6, 8)).square().sum().backward()
        state["optimizer"].step()
    assert same(live["model"].state_dict(), saved["model"].state_dict())


def test_optimizer_state_follows_names_not_order(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(6, 8)).sum().backward()
    optimizer.step()
    save_one(tmp_path, {"model": model, "optimizer": optimizer})
    other = small_model(5)
    backwards = torch.optim.Adam([{"params": list(other.parameters())[::-1]}])
    serai.Checkpointer(tmp_path).restore({"model": other, "optimizer": backwards})
    assert torch.equal(
        backwards.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"]
    )


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    save_one(tmp_path, {"rng": serai.RNG()})
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    serai.Checkpointer(tmp_path).restore({"rng": serai.RNG()})
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_nothing_there_is_none_and_touches_nothing(tmp_path: Path) -> None:
    state = trained(1)
    before = {k: v.clone() for k, v in state["model"].state_dict().items()}
    assert serai.Checkpointer(tmp_path / "new").restore(state) is None
    assert same(before, dict(state["model"].state_dict()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update(model=nn.Sequential(nn.Linear(8, 17))), "its shape is"),
        (lambda s: s.update(extra=torch.ones(1)), "extra: not in the checkpoint"),
        (lambda s: s.pop("model"), "model: in the checkpoint, but not in the state"),
        (lambda s: s.update(model=small_model().double()), "its dtype is float64"),
        (
            lambda s: s.update(optimizer=torch.optim.AdamW(s["model"][0].parameters())),
            "3.weight is not in the optimizer",
        ),
    ],
)
def test_mismatches_are_listed_and_nothing_is_touched(tmp_path: Path, change: Any, words: str) -> None:
    save_one(tmp_path, trained(1))
    live = trained(2)
    change(live)
    before = {k: v.clone() for k, v in live["model"].state_dict().items()} if "model" in live else {}
    checkpointer = serai.Checkpointer(tmp_path)
    with pytest.raises(StateMismatch, match=words):
        checkpointer.restore(live)
    if before:
        assert same(before, dict(live["model"].state_dict()))
    assert live["progress"]["epoch"] == 2


def test_not_strict_takes_what_matches(tmp_path: Path) -> None:
    save_one(tmp_path, {"model": small_model(1), "gone": 1})
    live = small_model(2)
    live.append(nn.Linear(4, 4))
    added = live[4].weight.clone()
    serai.Checkpointer(tmp_path).restore({"model": live}, strict=False)
    assert same(live[0].state_dict(), small_model(1)[0].state_dict())
    assert torch.equal(live[4].weight, added)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("victim", ["shard-00000-of-00001.safetensors", "values.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "delete", "grow"])
def test_damage_makes_restore_walk_back_and_say_so(tmp_path: Path, victim: str, harm: str) -> None:
    with serai.Checkpointer(tmp_path, memory=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.full((5000,), float(step))}).wait()
    (path,) = tmp_path.glob(f"step-00000002-*/{victim}")
    if harm == "flip":
        flip(path, path.stat().st_size // 2)
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif harm == "delete":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b"x" * 9)
    live = {"w": torch.zeros(5000)}
    quiet = harm == "delete" and victim == "manifest.json"  # then it is no checkpoint at all
    grown_shard = harm == "grow" and victim.startswith("shard")  # what was written is all there
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restored = serai.Checkpointer(tmp_path).restore(live)
    assert restored is not None
    assert restored.step == (2 if grown_shard else 1)
    assert torch.equal(live["w"], torch.full((5000,), float(restored.step)))
    if not grown_shard:
        assert any(victim in str(w.message) for w in caught)
        assert restored.skipped
    report = serai.verify(tmp_path)
    assert report.ok is quiet
    if quiet:
        return
    assert report.damage[0].file == victim
    if not grown_shard:
        live["w"].zero_()
        again = serai.Checkpointer(tmp_path)
        with pytest.raises((CheckpointCorrupt, CheckpointNotFound), match=victim), ignored_warnings():
            again.restore(live, step=2)
        assert not live["w"].any()


@contextlib.contextmanager
def ignored_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_nothing_that_verifies_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    with serai.Checkpointer(tmp_path, memory=False) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(10)})
    (path,) = tmp_path.glob("step-*/shard-*")
    flip(path, path.stat().st_size - 1)
    live = {"w": torch.zeros(10)}
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(CheckpointCorrupt, match=r"hold w"):
        serai.Checkpointer(tmp_path).restore(live)
    assert not live["w"].any()


def test_steps_older_generations_and_retention(tmp_path: Path) -> None:
    with serai.Checkpointer(tmp_path, keep=serai.Keep(last=2, every=4)) as checkpointer:
        for step in range(1, 10):
            checkpointer.save(step, {"w": torch.full((3,), float(step))}, metrics={"loss": 1 / step}).wait()
    assert sorted(g.step for g in generations(tmp_path)) == [4, 8, 9]
    assert generations(tmp_path)[0].metrics == {"loss": 1 / 9}
    live = {"w": torch.zeros(3)}
    restored = serai.Checkpointer(tmp_path).restore(live, step=4)
    assert restored is not None
    assert live["w"].tolist() == [4.0] * 3
    with pytest.raises(CheckpointNotFound, match="step 5"):
        serai.Checkpointer(tmp_path).restore(live, step=5)


def test_the_best_by_a_metric_is_kept(tmp_path: Path) -> None:
    with serai.Checkpointer(tmp_path, keep=serai.Keep(last=1, best="max:accuracy")) as checkpointer:
        for step, accuracy in enumerate([0.1, 0.9, 0.5, float("nan")]):
            checkpointer.save(step, {"x": step}, metrics={"accuracy": accuracy}).wait()
    assert sorted(g.step for g in generations(tmp_path)) == [1, 3]


def test_saving_a_step_again_makes_a_new_generation(tmp_path: Path) -> None:
    with serai.Checkpointer(tmp_path, keep=serai.Keep(last=5)) as checkpointer:
        for value in (1, 2):
            checkpointer.save(7, {"x": value}).wait()
    assert [g.step for g in generations(tmp_path)] == [7, 7]
    assert serai.load(tmp_path)["x"] == 2


def test_saves_in_flight_keep_their_own_values(tmp_path: Path) -> None:
    tensor = torch.zeros(300_000)
    with serai.Checkpointer(tmp_path, keep=serai.Keep(last=20)) as checkpointer:
        for step in range(12):
            tensor.fill_(step)
            checkpointer.save(step, {"w": tensor})
    for generation in generations(tmp_path):
        loaded = serai.load(tmp_path, step=generation.step)["w"]
        assert torch.equal(loaded, torch.full((300_000,), float(generation.step)))
    assert generations(tmp_path)[0].step == 11


def test_moved_and_resized_storage_between_saves(tmp_path: Path) -> None:
    state = {"w": torch.arange(4.0)}
    with serai.Checkpointer(tmp_path, keep=serai.Keep(last=9)) as checkpointer:
        for step in range(4):
            state["w"] = torch.full((4 + 1000 * step,), float(step))
            checkpointer.save(step, state).wait()
    for step in range(4):
        assert torch.equal(serai.load(tmp_path, step=step)["w"], torch.full((4 + 1000 * step,), float(step)))


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    checkpointer = serai.Checkpointer(tmp_path)
    with pytest.raises(UnsafeObject, match="thing"):
        checkpointer.save(1, {"thing": object()})
    with pytest.raises(UnsafeObject, match="sparse"):
        checkpointer.save(1, {"s": torch.eye(3).to_sparse()})
    checkpointer.save(2, {"fine": 1}).wait()
    checkpointer.close()
    assert [g.step for g in generations(tmp_path)] == [2]


def test_a_second_checkpointer_of_this_process_takes_over(tmp_path: Path) -> None:
    first = serai.Checkpointer(tmp_path)
    first.save(1, {"x": 1}).wait()
    second = serai.Checkpointer(tmp_path)
    second.save(2, {"x": 2}).wait()
    with pytest.raises(CheckpointError, match="taken over") as caught:
        first.save(3, {"x": 3})
    assert caught.value.code == "S427"
    first.close()
    second.close()
    assert [g.step for g in generations(tmp_path)] == [2, 1]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"on_error": "ignore"}, "S121"),
        ({"replicas": 1}, "S122"),
        ({"keep": None, "root": None}, "S124"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], code: str) -> None:
    with pytest.raises(SpecError) as caught:
        serai.Checkpointer(**{"root": tmp_path, **arguments})
    assert caught.value.code == code


@pytest.mark.parametrize("step", [-1, "3", 1.5, True])
def test_wrong_steps(tmp_path: Path, step: Any) -> None:
    checkpointer = serai.Checkpointer(tmp_path)
    with pytest.raises(SpecError, match="step="):
        checkpointer.save(step, {"x": 1})


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="is a file"):
        serai.Checkpointer(tmp_path / "file")
