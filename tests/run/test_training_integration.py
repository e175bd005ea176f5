"""The whole way, nothing faked: job file, supervisor, elastic, two training processes, agent, kills, resume.

Small enough for two cores: a model of some ten thousand weights on a few kilobytes of text of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.run.support import Recorder, last_step, wait_for

from serai.run.drill import drill
from serai.run.processes import leftovers
from serai.run.supervisor import run
from serai.run.workspace import Workspace
from serai.spec.resolve import resolve


def write_text(folder: Path) -> None:
    """A few documents of words with some order in them, so that there is something to learn."""
    words = [
        "the",
        "inn",
        "on",
        "the",
        "road",
        "where",
        "a",
        "long",
        "journey",
        "rests",
        "is",
        "safe",
        "and",
        "goes",
        "on",
        "in",
        "the",
        "morning",
    ]
    source = random.Random(7)
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text(" ".join(source.choices(words, k=700)))


def job(folder: Path, *, steps: int, strategy: str, every: int = 5) -> Path:
    write_text(folder / "text")
    document: dict[str, Any] = {
        "serai": 1,
        "name": "small",
        "model": {"preset": "tiny", "layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 64},
        "data": {"text": ["text"], "seq_len": 32, "tokenizer": {"vocab_size": 300}},
        "train": {
            "steps": steps,
            "micro_batch": 4,
            "evaluate_every": steps,
            "evaluate_rows": 8,
            "learning_rate": 0.003,
        },
        "parallel": {"strategy": strategy},
        "checkpoint": {"every": every},
        "resources": {"processes": 2, "device": "cpu"},
        "retry": {"backoff_s": 0.0},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.timeout(600)
def test_a_drill_over_fsdp2_is_identical_to_the_last_bit(tmp_path: Path) -> None:
    console = Recorder()
    workspace = Workspace(tmp_path / "ws")
    report = drill(resolve(job(tmp_path, steps=32, strategy="fsdp2")), workspace, console=console)
    assert report.identical, report.text()
    assert report.max_loss_difference == 0.0
    assert report.weights_identical is True
    assert report.steps == 32
    assert report.executions > 32
    assert len(report.faults) == 4
    assert report.resumes >= 3
    first, second = report.faults[:2]
    assert first.resumed_from is not None, "the first fault waits for a durable checkpoint"
    assert second.resumed_from is not None, "the second resume, before another save"
    assert report.faults[3].resumed_from is not None
    assert workspace.runs() == []


@pytest.mark.timeout(600)
def test_a_stopped_run_resumes_under_ddp_and_learns(tmp_path: Path) -> None:
    spec = resolve(job(tmp_path, steps=30, strategy="ddp", every=100))
    workspace = Workspace(tmp_path / "ws")
    found = workspace.create(spec.name, spec_text=spec.text, resolved=spec.to_json())
    found.update(job_file=spec.path, job_folder=str(spec.folder))
    with subprocess.Popen(
        [sys.executable, "-m", "serai.run", str(found.path)], stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: last_step(found) >= 6, what="step 6", seconds=120)
        os.kill(process.pid, 15)
        words = process.communicate(timeout=90)[1]
    assert process.returncode == 75, words
    assert "saving at the next step" in words
    stopped = last_step(found)
    assert found.state()["durable_step"] == stopped
    assert leftovers(found.path) == []
    console = Recorder()
    assert run(spec, workspace, console=console) == 0
    assert f"resumed from step {stopped}" in console.text
    document = json.loads(found.report_json.read_text())
    assert document["progress"]["last_step"] == 30
    assert document["progress"]["repeated_steps"] == 0
    assert document["progress"]["validation_loss"] < document["steps"][0]["loss"] - 0.5
    assert document["progress"]["unigram_entropy"] > 0
    assert document["environment"]["world_size"] == 2
    assert [entry["step"] for entry in document["checkpoints"]] == [stopped, 30]
    assert leftovers(found.path) == []
