"""``serai plan`` as a person uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.serai_program import serai

JOB = """serai: 1
name: demo
model: {family: llama, preset: tiny}
data: {corpus: shakespeare, seq_len: 128}
train: {steps: 30, micro_batch: 4}
resources: {processes: 2, device: cpu}
"""


def test_a_layout_as_text_and_as_json(tmp_path: Path) -> None:
    given = ("plan", "gpt-175b", "--on", "ndm-a100-v4", "--nodes", "128", "--set", "zero=3", "--set", "micro_batch=8",
             "--set", "layout.seq_len=1024", "--set", "precision=fp16", "--set", "recompute=full")  # fmt: skip
    text = serai(*given, "--explain", cwd=tmp_path)
    assert (text.code, text.err) == (0, "")
    assert "fits: " in text.out
    assert "sharded weights and gradients" in text.out
    found = serai(*given, "--json", cwd=tmp_path).json
    p = found["prediction"]
    assert p["cluster"]["gpus"] == 1024
    assert p["layout"]["data_parallel"] == 1024
    assert sum(t["value"] for t in p["terms"] if t["kind"] == "time") == pytest.approx(p["step_time_s"])
    # published: 164.4 TFLOPs a GPU with the recomputed forward counted, ±2 read off a chart
    assert p["hfu"] * 312 == pytest.approx(164.4, rel=0.08)
    assert found["budget"]["goodput"] > 0.9
    assert "search" not in found


def test_a_search_and_its_report(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = serai("plan", "config.json", "--on", "h100-80gb", "--batch", "256", "--html", "plan.html", "--json", cwd=tmp_path).json  # fmt: skip
    assert found["search"]["best"][0]["layout"] == found["prediction"]["layout"]
    assert found["search"]["losers"]
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


def test_a_job_file(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text(JOB)
    found = serai("plan", "demo.yaml", "--json", cwd=tmp_path).json["prediction"]
    assert (found["cluster"]["name"], found["cluster"]["gpus"]) == ("this-host", 2)
    assert (found["layout"]["zero"], found["layout"]["seq_len"]) == (3, 128)
    on_gpus = serai("plan", "demo.yaml", "--on", "a100-80gb", "--json", cwd=tmp_path).json["prediction"]
    assert on_gpus["cluster"]["gpu"] == "a100-80gb"


def test_the_error_table(tmp_path: Path) -> None:
    found = serai("plan", "--check", "--json", cwd=tmp_path, timeout=120).json["check"]
    assert {line["source"] for line in found["fitted"]} == {line["source"] for line in found["left_out"]}
    assert len(found["headline"]) == 4
    assert all(abs(point["error"]) <= 0.08 for point in found["headline"])


def test_what_is_known(tmp_path: Path) -> None:
    found = serai("plan", "--list", "--json", cwd=tmp_path).json
    assert found["models"]["llama3-70b"] == pytest.approx(70.55e9, rel=0.002)
    assert found["machines"]["ndm-a100-v4"]["gpus"] == 8
    assert "default" in found["profiles"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), "S146"),
        (("lama3-8b", "--on", "h100"), "S139"),
        (("llama3-8b",), "S146"),
        (("llama3-8b", "--on", "h100x"), "S130"),
        (("llama3-8b", "--on", "h100", "--set", "tpp=2"), "S146"),
        (("llama3-8b", "--on", "h100", "--set", "tp=3"), "S133"),
        (("llama3-8b", "--on", "h100", "--profile", "none/such", "--set", "tp=2"), "S136"),
    ],
)
def test_errors_name_the_way_out(tmp_path: Path, arguments: tuple[str, ...], code: str) -> None:
    failed = serai("plan", *arguments, "--json", cwd=tmp_path)
    assert failed.code == 2
    assert failed.json["error"]["code"] == code
    assert failed.json["error"]["expected"]


def test_calibration_from_a_run(tmp_path: Path) -> None:
    """A run's folder as the supervisor leaves it: the profile it gives predicts that run's steps."""
    from serai.events import EventWriter

    (tmp_path / "demo.yaml").write_text(JOB)
    guess = serai("plan", "demo.yaml", "--json", cwd=tmp_path).json["prediction"]["step_time_s"]
    resolved = serai("run", "demo.yaml", "--dry-run", "--show-config", "--json", cwd=tmp_path)
    assert resolved.code == 0, resolved.out
    run = tmp_path / ".serai/runs/demo-abc123"
    from serai.spec import resolve

    run.mkdir(parents=True)
    (run / "resolved.json").write_text(json.dumps(resolve(str(tmp_path / "demo.yaml")).to_json()))
    (run / "spec.yaml").write_text(JOB)
    (run / "run.json").write_text(json.dumps({"schema_version": 1, "id": "demo-abc123", "name": "demo", "status": "finished", "created": 1.0, "exit_code": 0, "attempts": 1}))  # fmt: skip
    events = EventWriter(run / "events/rank-00000.jsonl", rank=0, attempt=1)
    events.write("start", world_size=2, device="cpu")
    for step in range(1, 27):
        events.write("step", step=step, seconds=guess * 3)
    events.close()
    from serai.run.report_data import collect
    from serai.run.report_html import render
    from serai.run.workspace import Run

    before = collect(Run(run))["predicted"]
    assert (before["calibrated"], before["inside"]) == (False, False)
    assert before["measured_step_s"] == pytest.approx(guess * 3)
    found = serai("plan", "--calibrate", "demo", "--out", "host.toml", "--json", cwd=tmp_path).json
    assert found["runs"][0]["after_s"] == pytest.approx(guess * 3, rel=0.05)
    after = serai("plan", "demo.yaml", "--profile", "host.toml", "--json", cwd=tmp_path).json["prediction"]
    assert after["step_time_s"] == pytest.approx(guess * 3, rel=0.05)
    # without --out it becomes the workspace's own, which plans of this host and reports take by themselves
    serai("plan", "--calibrate", "demo", "--json", cwd=tmp_path)
    own = serai("plan", "demo.yaml", "--json", cwd=tmp_path).json["prediction"]
    assert own["step_time_s"] == pytest.approx(guess * 3, rel=0.05)
    reported = collect(Run(run))["predicted"]
    assert (reported["calibrated"], reported["inside"]) == (True, True)
    assert reported["ratio"] == pytest.approx(1, rel=0.05)
    page = render(collect(Run(run)))
    assert "Predicted against measured" in page
    assert "never calibrated" not in page
