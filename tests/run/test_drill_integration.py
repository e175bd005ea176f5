"""The drill over fake jobs: what is identical is called so, what is not is found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.run.support import FAKE_WORKER, HERE, Jobs, Recorder

from serai.errors import SpecError, TrainingError
from serai.run.drill import drill
from serai.run.drill_report import DrillReport
from serai.run.processes import leftovers
from serai.run.workspace import Run
from serai.spec.resolve import resolve

SUPERVISOR = (sys.executable, str(HERE / "supervise.py"))


def run_drill(
    jobs: Jobs,
    folder: Path,
    *args: str,
    console: Recorder | None = None,
    same_weights: Callable[[Path, Path], bool | None] = lambda first, second: None,
) -> DrillReport:
    path = folder / "job.yaml"
    document = {
        "serai": 1,
        "name": "demo",
        "script": str(FAKE_WORKER),
        "args": list(args),
        "resources": {"processes": 2},
    }
    path.write_text(yaml.safe_dump(document))
    return drill(
        resolve(path),
        jobs.workspace,
        console=console or Recorder(),
        supervisor=SUPERVISOR,
        same_weights=same_weights,
    )


def test_five_lives_and_the_same_losses(jobs: Jobs, tmp_path: Path) -> None:
    console = Recorder()
    report = run_drill(
        jobs, tmp_path, "--steps", "40", "--step-seconds", "0.05", "--every", "8", console=console
    )
    assert report.identical
    assert report.max_loss_difference == 0.0
    assert report.steps == 40
    assert report.executions > 40
    assert report.resumes == 4
    assert [fault.fault for fault in report.faults] == [
        "kill -9 of rank 1",
        "kill -9 of rank 0, right after the resume",
        "kill -9 of all processes",
        "SIGTERM to the supervisor (preemption)",
    ]
    first, second, third, fourth = report.faults
    assert first.at_step >= 10
    assert first.resumed_from is not None
    assert second.at_step >= first.resumed_from + 1
    assert third.at_step >= 20
    assert fourth.resumed_from is not None
    assert fourth.at_step >= 30
    assert fourth.resumed_from >= fourth.at_step
    assert all(
        fault.tier == "local" and fault.lost_s is not None and 0 < fault.lost_s < 30
        for fault in report.faults
    )
    text = report.text()
    assert "identical: 40 steps have the same loss to the last bit (4 faults, 4 resumes" in text
    assert text.splitlines()[0].split() == ["FAULT", "AT", "STEP", "RESUMED", "FROM", "TIER", "LOST"]
    folder = Path(report.folder)
    assert folder.parent == jobs.workspace.path / "drills"
    assert jobs.workspace.runs() == []
    for run in (folder / "runs").glob("[!.]*"):
        assert leftovers(run) == []
        assert not Run(run).checkpoints.exists()


def test_a_job_that_resumes_wrongly_is_found(jobs: Jobs, tmp_path: Path) -> None:
    report = run_drill(jobs, tmp_path, "--steps", "16", "--step-seconds", "0.05", "--every", "4", "--forget")
    assert not report.identical
    assert report.max_loss_difference > 0
    assert report.differing_steps
    assert f"first step {report.differing_steps[0]}" in report.text()
    assert report.to_json()["identical"] is False


def test_a_job_that_fails_by_itself_is_said_at_once(jobs: Jobs, tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match="fails without any fault: ValueError: the labels are wrong"
    ) as caught:
        run_drill(jobs, tmp_path, "--fault", "user", "--always")
    assert caught.value.code == "S530"
    assert str(caught.value.where).endswith("rank-00000.log")


def test_too_few_steps(jobs: Jobs, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        run_drill(jobs, tmp_path, "--steps", "5")
    assert caught.value.code == "S531"
