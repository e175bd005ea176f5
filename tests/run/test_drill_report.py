"""The comparison of two runs: every execution of every step, by its bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serai.run.drill_report import DrillReport, FaultOutcome, Injected, compare
from serai.run.workspace import Run, Workspace


def step(number: int, loss: float, *, attempt: int = 1, when: float = 0.0) -> dict[str, Any]:
    return {
        "time": when,
        "kind": "step",
        "attempt": attempt,
        "step": number,
        "loss": loss,
        "loss_hex": loss.hex(),
    }


def restored(number: int, *, attempt: int) -> dict[str, Any]:
    return {
        "time": 0.0,
        "kind": "restored",
        "attempt": attempt,
        "step": number,
        "tier": "memory",
        "seconds": 0.1,
    }


def make(folder: Path, name: str, *events: dict[str, Any]) -> Run:
    run = Workspace(folder).create(name, spec_text="", resolved={"name": name})
    run.rank_events(0).write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def judge(
    folder: Path, *struck: dict[str, Any], faults: tuple[Injected, ...] = (), weights: bool | None = True
) -> DrillReport:
    untouched = make(folder, "untouched", *(step(number, 1.0 / number) for number in range(1, 5)))
    return compare(
        untouched,
        make(folder, "struck", *struck),
        list(faults),
        same_weights=weights,
        reference_s=1.0,
        seconds=3.0,
    )


SAME = [step(1, 1.0), step(2, 0.5), step(3, 1 / 3), step(4, 0.25)]


def test_the_same_bits(tmp_path: Path) -> None:
    report = judge(tmp_path, *SAME)
    assert report.identical
    assert (report.steps, report.executions, report.max_loss_difference) == (4, 4, 0.0)
    assert "to the last bit, final weights too (0 faults, 0 resumes, 0 steps run again)" in report.text()


def test_one_bit_in_a_step_that_was_run_again_is_found(tmp_path: Path) -> None:
    import math

    report = judge(
        tmp_path, step(1, 1.0), step(2, math.nextafter(0.5, 1.0)), restored(1, attempt=2), *SAME[1:]
    )
    assert not report.identical
    assert report.differing_steps == [2]
    assert report.max_loss_difference == math.nextafter(0.5, 1.0) - 0.5


def test_a_missing_step_and_one_too_many_are_found(tmp_path: Path) -> None:
    report = judge(tmp_path, SAME[0], SAME[1], SAME[3], step(5, 0.2))
    assert report.differing_steps == [3, 5]
    assert not report.identical


def test_no_steps_are_not_identical(tmp_path: Path) -> None:
    untouched, struck = make(tmp_path, "a"), make(tmp_path, "b")
    assert not compare(untouched, struck, [], same_weights=None, reference_s=0.0, seconds=0.0).identical


def test_weights_count_unless_they_are_unknown(tmp_path: Path) -> None:
    assert judge(tmp_path / "1", *SAME, weights=None).identical
    report = judge(tmp_path / "2", *SAME, weights=False)
    assert not report.identical
    assert report.differing_steps == []
    assert "NOT identical: the losses agree, the final weights do not" in report.text()


def test_what_each_fault_cost(tmp_path: Path) -> None:
    report = judge(
        tmp_path,
        step(1, 1.0, when=10.0),
        step(2, 0.5, when=11.0),
        restored(1, attempt=2),
        step(2, 0.5, attempt=2, when=15.0),
        step(1, 1.0, attempt=3, when=20.0),
        step(2, 0.5, attempt=3, when=21.0),
        restored(2, attempt=4),
        step(3, 1 / 3, attempt=4, when=30.0),
        step(4, 0.25, attempt=4, when=31.0),
        faults=(
            Injected("one", at_step=2, attempt=1, time=11.5),
            Injected("two", at_step=2, attempt=2, time=15.5),
            Injected("three", at_step=2, attempt=3, time=21.5),
        ),
    )
    assert report.identical
    assert report.faults == [
        FaultOutcome("one", 2, 1, "memory", 3.5),
        FaultOutcome("two", 2, None, None, 5.5),
        FaultOutcome("three", 2, 2, "memory", 8.5),
    ]
    table = report.text().splitlines()
    assert table[2].split() == ["two", "2", "the", "start", "-", "5.5", "s"]


def test_json(tmp_path: Path) -> None:
    document = json.loads(json.dumps(judge(tmp_path, *SAME).to_json()))
    assert document["identical"] is True
    for key in ("max_loss_difference", "faults", "resumes", "seconds"):
        assert key in document
    assert document["seconds"] == pytest.approx(3.0)
