"""Events of a rank, signs of life, and what becomes of saves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serai.errors import SaveFailed, SeraiError
from serai.events import EventWriter, read_events
from serai.train.reporting import Reporter, StepFigures
from serai.train.saving import Checkpoints

FIGURES = StepFigures(
    step=3, loss=0.1 + 0.2, tokens=512, seconds=0.25, lr=1e-3, grad_norm=1.5, data_wait_s=0.01
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-00000.jsonl"


def test_rank_0_reports_steps_to_the_last_bit(path: Path) -> None:
    Reporter(EventWriter(path, rank=0), rank=0).step(FIGURES)
    (event,) = read_events(path)
    assert event["kind"] == "step"
    assert float.fromhex(event["loss_hex"]) == event["loss"] == 0.30000000000000004
    assert event["tokens_per_s"] == 2048.0


def test_other_ranks_show_that_they_live_once_a_second(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("serai.train.reporting.time.monotonic", lambda: clock.now)
    reporter = Reporter(EventWriter(path, rank=1), rank=1)
    for _ in range(30):
        reporter.step(FIGURES)
        clock.now += 0.1
    events = list(read_events(path))
    assert [event["kind"] for event in events] == ["heartbeat"] * 3
    assert events[0]["step"] == 3


@dataclass
class Handle:
    """A save whose fate the test decides."""

    generation: str
    bytes: int = 100
    stall: Any = field(
        default_factory=lambda: SimpleNamespace(
            call=0.1, gate=0.0, inflation=0.0, back_pressure=0.2, finalise=0.0
        )
    )
    error: SeraiError | None = None
    superseded_by: int | None = None
    durable: bool = False

    def done(self, tier: str = "durable") -> bool:
        return self.durable

    def wait(self, tier: str = "durable", timeout: float | None = None) -> None:
        raise self.error or SaveFailed("not yet", code="S416")


class Checkpointer:
    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.closed: float | None = None

    def restore(self, state: dict[str, Any]) -> Any:
        return None

    def save(self, step: int, state: dict[str, Any], *, metrics: dict[str, float] | None = None) -> Handle:
        self.handles.append(Handle(f"step-{step}"))
        return self.handles[-1]

    def close(self, timeout: float | None = None) -> None:
        self.closed = timeout


@pytest.fixture
def checkpointer() -> Checkpointer:
    return Checkpointer()


@pytest.fixture
def checkpoints(path: Path, checkpointer: Checkpointer) -> Checkpoints:
    return Checkpoints(checkpointer, {}, Reporter(EventWriter(path), rank=0), every=5)


def _kinds(path: Path) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in read_events(path) if event["kind"] != "heartbeat"]


def test_a_save_is_reported_with_its_five_stall_terms_and_when_durable(
    path: Path, checkpointer: Checkpointer, checkpoints: Checkpoints
) -> None:
    assert [step for step in range(1, 11) if checkpoints.due(step)] == [5, 10]
    checkpoints.save(5, loss=2.0)
    checkpoints.save(5, loss=2.0)
    checkpoints.notice()
    assert _kinds(path) == [("save", 5)]
    (event,) = read_events(path)
    assert {key: value for key, value in event.items() if key.endswith("_s")} == {
        "call_s": 0.1,
        "gate_s": 0.0,
        "inflation_s": 0.0,
        "back_pressure_s": 0.2,
        "finalise_s": 0.0,
    }
    checkpointer.handles[0].durable = True
    checkpoints.notice()
    checkpoints.wait(timeout=1.0)
    assert _kinds(path) == [("save", 5), ("durable", 5)]
    checkpoints.close(timeout=3.0)
    assert checkpointer.closed == 3.0


def test_steps_that_take_longer_beside_a_save_are_its_inflation(
    path: Path, checkpointer: Checkpointer, checkpoints: Checkpoints
) -> None:
    for seconds in (0.9, 1.0, 1.0, 1.1, 1.0):
        checkpoints.observe(seconds)
    checkpoints.save(5, loss=1.0)
    for seconds in (1.5, 0.9, 1.25):
        checkpoints.observe(seconds)
    checkpointer.handles[0].durable = True
    checkpoints.notice()
    (durable,) = read_events(path, kind="durable")
    assert durable["inflation_s"] == pytest.approx(0.65)
    checkpoints.observe(9.0)
    assert checkpointer.handles[0].stall.inflation == pytest.approx(0.65)
    checkpoints.save(10, loss=1.0)
    checkpoints.observe(0.5)
    assert checkpointer.handles[1].stall.inflation == 0.0


def test_a_failed_or_superseded_save_is_reported_and_training_goes_on(
    path: Path, checkpointer: Checkpointer, checkpoints: Checkpoints
) -> None:
    for step in (5, 10, 15):
        checkpoints.save(step, loss=1.0)
    checkpointer.handles[0].error = SaveFailed("disk full")
    checkpointer.handles[1].superseded_by = 15
    checkpointer.handles[2].durable = True
    checkpoints.notice()
    assert _kinds(path)[3:] == [("save_failed", 5), ("superseded", 10), ("durable", 15)]
    checkpoints.wait(timeout=1.0)


def test_a_last_save_that_failed_is_an_error_even_if_it_was_noticed_before(
    checkpointer: Checkpointer, checkpoints: Checkpoints
) -> None:
    checkpoints.save(5, loss=1.0)
    checkpointer.handles[0].error = SaveFailed("disk full")
    with pytest.raises(SaveFailed, match="disk full"):
        checkpoints.wait(timeout=1.0)
    checkpoints.notice()
    with pytest.raises(SaveFailed, match="disk full"):
        checkpoints.wait(timeout=1.0)


def test_a_last_save_that_does_not_end_is_an_error_within_its_time(checkpoints: Checkpoints) -> None:
    checkpoints.save(5, loss=1.0)
    with pytest.raises(SaveFailed, match="not durable within") as caught:
        checkpoints.wait(timeout=0.05)
    assert caught.value.code == "S606"
