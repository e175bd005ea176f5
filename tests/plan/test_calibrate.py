"""Refitting three constants from measured steps, and predicted against measured for a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serai.errors import SpecError
from serai.events import EventWriter, read_events
from serai.plan import Layout, Model, predict
from serai.plan.calibrate import Measured, calibrate, calibrated_names, host_cluster, measured_from_events
from serai.plan.feedback import job_layout, job_model, predicted_against_measured
from serai.plan.profiles import load_profile, read_profile, write_profile

SHAPE = {"layers": 4, "hidden": 128, "heads": 4, "kv_heads": 2, "ffn": 352, "tie_embeddings": True}
DOCUMENT: dict[str, Any] = {
    "name": "demo",
    "data": {"seq_len": 256},
    "train": {"micro_batch": 8, "grad_accumulation": 2, "precision": "fp32"},
    "parallel": {"strategy": "fsdp2"},
    "resources": {"nodes": 1, "processes": 2, "threads": 1},
}


def _events(path: Path, seconds: list[float]) -> list[dict[str, Any]]:
    writer = EventWriter(path, rank=0, attempt=1)
    writer.write("start", world_size=2)
    for step, value in enumerate(seconds, 1):
        writer.write("step", step=step, seconds=value, loss=1.0)
    writer.close()
    return list(read_events(path))


def _truth(slow: float = 2.5) -> Any:
    """A machine whose compute, host and memory differ from the default by known factors."""
    base = load_profile("default")
    k = base.constants
    return replace(
        base, constants=replace(k, gemm=k.gemm / slow, launch_us=k.launch_us * 3, passes=k.passes * 1.5)
    )


def test_calibration_recovers_a_slower_machine(tmp_path: Path) -> None:
    """Steps are drawn from known constants; the refit must predict layouts it has not seen."""
    truth = _truth()
    host = host_cluster(1, threads=1)
    shapes = [
        (Model("llama", 4, 128, 4, 2, 352, 2048), Layout(zero=0, micro_batch=8, seq_len=128, precision="fp32", attention="flash")),
        (Model("llama", 6, 384, 6, 3, 1024, 2048), Layout(zero=0, micro_batch=2, seq_len=256, precision="fp32", attention="flash")),
        (Model("llama", 2, 512, 8, 8, 1024, 4096), Layout(zero=0, micro_batch=4, seq_len=64, precision="fp32", attention="flash")),
    ]  # fmt: skip
    noise = np.random.default_rng(0)
    runs = []
    for model, layout in shapes:
        real = predict(model, host, layout, profile=truth).step_time_s
        runs.append(Measured(model, host, layout, tuple(real * np.exp(noise.normal(0, 0.03, 20)))))
    before = load_profile("default")
    after = calibrate(runs, before)
    assert calibrated_names(runs) == ("gemm", "launch_us", "passes")
    changed = {
        n for n in after.constants.names() if getattr(after.constants, n) != getattr(before.constants, n)
    }
    assert changed == {"gemm", "launch_us", "passes"}
    unseen = Model("llama", 8, 256, 8, 4, 704, 2048)
    layout = Layout(zero=0, micro_batch=4, seq_len=256, precision="fp32", attention="flash")
    real = predict(unseen, host, layout, profile=truth).step_time_s
    assert abs(predict(unseen, host, layout, profile=before).step_time_s / real - 1) > 0.3
    assert predict(unseen, host, layout, profile=after).step_time_s == pytest.approx(real, rel=0.1)
    write_profile(after, tmp_path / "host.toml")
    again = read_profile(tmp_path / "host.toml")
    assert again.measured
    assert predict(unseen, host, layout, profile=str(tmp_path / "host.toml")).step_time_s == pytest.approx(
        predict(unseen, host, layout, profile=after).step_time_s, rel=1e-3
    )


def test_which_constants_a_run_can_tell() -> None:
    model, layout = Model("gpt", 2, 128, 2), Layout(zero=3)
    two = Measured(model, host_cluster(2, 1), layout, (1.0,) * 20)
    assert calibrated_names([two]) == ("gemm", "launch_us", "intra")
    far = Measured(model, host_cluster(2, 1).replace(nodes=2), layout, (1.0,) * 20)
    assert calibrated_names([two, far]) == ("gemm", "launch_us", "inter")
    with pytest.raises(SpecError):
        calibrate([], load_profile("default"))


def test_steps_of_the_last_attempt_after_the_warm_up(tmp_path: Path) -> None:
    events = _events(tmp_path / "rank-00000.jsonl", [9.0] * 30)
    events = _events(tmp_path / "rank-00000.jsonl", [5.0, 5.0, 5.0, *[0.1] * 20])
    run = measured_from_events(events, job_model(SHAPE, 4096), host_cluster(2, 1), job_layout(DOCUMENT))
    assert run.seconds == (0.1,) * 20
    with pytest.raises(SpecError) as caught:
        measured_from_events(events[:-1], run.model, run.cluster, run.layout)
    assert caught.value.code == "S145"


def test_predicted_against_measured(tmp_path: Path) -> None:
    layout = job_layout(DOCUMENT)
    assert (layout.zero, layout.micro_batch, layout.grad_accum, layout.seq_len) == (3, 8, 2, 256)
    guess = predict(job_model(SHAPE, 4096), host_cluster(2, 1), layout).step_time_s
    events = _events(tmp_path / "rank-00000.jsonl", [10.0, 10.0, 10.0, *[guess * 2] * 25])
    row = predicted_against_measured(DOCUMENT, SHAPE, 4096, events)
    assert row is not None
    assert row["measured_step_s"] == pytest.approx(guess * 2)
    assert row["ratio"] == pytest.approx(0.5)
    assert row["steps"] == 25
    assert sum(row["terms"].values()) == pytest.approx(row["predicted_step_s"])
    assert predicted_against_measured(DOCUMENT, SHAPE, 4096, events[:3]) is None
    assert predicted_against_measured(DOCUMENT, {"layers": 1}, 4096, events) is None
