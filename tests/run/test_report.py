"""The report's figures from known events, and a page that asks nobody for anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from serai.run import report
from serai.run.charts import Level, Mark, Series, bar_of_parts, line_chart, stacked_columns, ticks
from serai.run.report_html import render
from serai.run.workspace import Run, Workspace


def write(path: Path, *events: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def step(number: int, when: float, *, attempt: int = 1, loss: float = 2.0) -> dict[str, Any]:
    return {
        "time": when, "kind": "step", "rank": 0, "attempt": attempt, "step": number, "loss": loss,
        "loss_hex": loss.hex(), "tokens": 100, "seconds": 1.0, "tokens_per_s": 100.0, "data_wait_s": 0.25,
        "lr": 1e-3, "grad_norm": 1.0,
    }  # fmt: skip


def save(number: int, when: float, *, call: float, size: int, rank: int = 0) -> dict[str, Any]:
    return {"time": when, "kind": "save", "rank": rank, "attempt": 1, "step": number, "generation": f"g{number}",
            "call_s": call, "gate_s": 0.01, "inflation_s": 0.02, "back_pressure_s": 0.0, "finalise_s": 0.0,
            "bytes": size}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Prepared for 2 s, trained 3 steps, killed after step 3, restored step 2, finished step 4."""
    made = Workspace(tmp_path).create(
        "demo", spec_text="name: <demo>\n", resolved={"name": "demo", "train": {"steps": 4}}
    )
    write(
        made.supervisor_events,
        {"time": 100.0, "kind": "run_started"},
        {"time": 102.0, "kind": "prepared", "seconds": 2.0, "unigram_entropy": 6.5, "corpus": "x"},
        {"time": 102.0, "kind": "attempt_started", "attempt": 1, "processes": 2, "pids": [1, 2]},
        {"time": 108.5, "kind": "attempt_ended", "attempt": 1, "status": "failed", "cause": "killed",
         "first_failing_rank": 1, "message": "killed <b>", "last_step": 3},
        {"time": 108.6, "kind": "attempt_started", "attempt": 2, "processes": 2, "pids": [3, 4]},
        {"time": 115.0, "kind": "attempt_ended", "attempt": 2, "status": "finished", "cause": None,
         "first_failing_rank": None, "message": None, "last_step": 4},
        {"time": 115.0, "kind": "run_ended", "status": "finished", "exit_code": 0},
    )  # fmt: skip
    write(
        made.rank_events(0),
        {"time": 104.0, "kind": "start", "rank": 0, "attempt": 1, "world_size": 2, "parameters": 1234567, "device": "cpu", "torch": "2"},
        step(1, 105.0, loss=3.0),
        step(2, 106.0),
        save(2, 106.2, call=0.1, size=1000),
        {"time": 106.9, "kind": "durable", "rank": 0, "attempt": 1, "step": 2, "generation": "g2", "seconds_after_save": 0.7},
        step(3, 107.2),
        {"time": 110.0, "kind": "restored", "rank": 0, "attempt": 2, "step": 2, "tier": "memory", "generation": "g2", "seconds": 0.3},
        step(3, 112.0, attempt=2),
        step(4, 113.0, attempt=2, loss=1.5),
        {"time": 114.0, "kind": "evaluation", "rank": 0, "attempt": 2, "step": 4, "loss": 1.75, "tokens": 50, "seconds": 0.5},
    )  # fmt: skip
    write(made.rank_events(1), save(2, 106.2, call=0.3, size=500, rank=1))
    made.update(status="finished", exit_code=0, attempts=2, note="", failure=None, job_file="job.yaml")
    return made


def test_figures(run: Run) -> None:
    document = report.collect(run)
    progress = document["progress"]
    assert progress == {
        "last_step": 4, "total_steps": 4, "last_durable_step": 2, "tokens": 400, "final_loss": 1.5,
        "final_loss_hex": (1.5).hex(), "validation_loss": 1.75, "unigram_entropy": 6.5, "tokens_per_s": 100.0,
        "step_s": 1.0, "repeated_steps": 1,
    }  # fmt: skip
    assert [entry["attempt"] for entry in document["steps"]] == [1, 1, 2, 2]
    first, second = document["attempts"]
    assert (first["cause"], first["first_failing_rank"], first["last_step"], first["restored_step"]) == (
        "killed", 1, 3, None,
    )  # fmt: skip
    assert (second["restored_step"], second["tier"], second["restore_s"], second["repeated_steps"]) == (
        2, "memory", 0.3, 1,
    )  # fmt: skip
    assert second["first_step_s"] == pytest.approx(3.4)
    (checkpoint,) = document["checkpoints"]
    assert (checkpoint["bytes"], checkpoint["call_s"], checkpoint["durable_s"]) == (1500, 0.3, 0.7)


def test_the_time_adds_up(run: Run) -> None:
    spent = report.collect(run)["time"]
    assert spent["total"] == 15.0
    assert spent["compute"] == pytest.approx(3.0)
    assert spent["data_wait"] == pytest.approx(1.0)
    assert spent["checkpoint_stall"] == pytest.approx(0.31)
    assert spent["repeated"] == 1.0
    assert spent["evaluate"] == 0.5
    assert spent["prepare"] == 2.0
    assert spent["start"] == pytest.approx(2.0)
    assert spent["restart"] == pytest.approx(2.5)
    assert sum(value for key, value in spent.items() if key != "total") == pytest.approx(15.0)


def test_time_between_two_supervisors_is_nobodys(run: Run) -> None:
    events = [json.loads(line) for line in run.supervisor_events.read_text().splitlines()]
    more = [{"time": 1000.0, "kind": "run_started"}, {"time": 1004.0, "kind": "prepared", "seconds": 4.0}]
    write(run.supervisor_events, *events, *more)
    assert report.collect(run)["time"]["total"] == 19.0


def test_the_page_is_whole_and_asks_nobody(run: Run) -> None:
    document = report.write(run)
    assert json.loads(run.report_json.read_text()) == json.loads(json.dumps(document))
    page = run.report_html.read_text()
    assert not re.search(r"(?:src|href)=[\"'](?!data:)", page)
    assert not re.search(r"@import|url\(|<script", page)
    assert "killed &lt;b&gt;" in page
    assert "name: &lt;demo&gt;" in page
    assert "<b>1.7500</b>" in page
    assert "unigram entropy 6.5" in page
    assert "prefers-color-scheme: dark" in page
    assert page.count("<svg") == 4
    assert "resumed from step 2 (memory tier) after: killed" in page


def test_a_run_that_never_trained_has_a_page_too(tmp_path: Path) -> None:
    run = Workspace(tmp_path).create("new", spec_text="", resolved={"name": "new"})
    run.update(note="", failure=None)
    page = render(report.collect(run))
    assert "loss: nothing was recorded" in page


def test_the_summary_has_five_lines_and_what_to_type_next(run: Run) -> None:
    lines = report.summary(report.collect(run))
    assert lines == [
        "demo finished · step 4 of 4 · 15.0 s, 1 resume",
        "  learnt   loss 1.5000 · validation loss 1.7500 (unigram entropy 6.5000) · 100 tokens/s",
        "  saved    newest durable checkpoint: step 2; 1 save, 300.0 ms a call",
        f"  report   {run.path}/report.html",
        "  next     serai show demo   serai ckpt ls demo   serai ckpt verify demo",
    ]


def test_a_failure_says_everything(run: Run) -> None:
    failure = {
        "cause": "user_error", "code": "S510", "words": "the training script failed", "rank": 1, "host": "h7",
        "attempt": 2, "message": "ValueError: bad", "traceback": "Traceback:\n  ValueError: bad", "log": "/x/rank-00001.log",
        "advice": "fix what the traceback shows",
    }  # fmt: skip
    run.update(status="failed", exit_code=1, failure=failure, note="a relaunch would fail in the same way")
    text = "\n".join(report.summary(report.write(run)))
    for said in (
        "[S510] demo failed: the training script failed (user_error)", "rank 1 on h7, attempt 2: ValueError: bad",
        "Traceback:", "step 4, newest durable checkpoint: step 2", "/x/rank-00001.log", "serai run job.yaml",
        "serai explain S510", "a relaunch would fail in the same way",
    ):  # fmt: skip
        assert said in text
    assert "rank 1 on h7" in run.report_html.read_text()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (1.13, 1.98, [1.2, 1.4, 1.6, 1.8]),
        (3, 3, [3]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == expected


def test_lines_keep_their_spikes_when_thinned_and_skip_what_is_no_number() -> None:
    points = [(float(x), 1.0) for x in range(5000)]
    points[2500] = (2500.0, 9.0)
    points[17] = (17.0, float("nan"))
    chart = line_chart([Series("loss", points, "s1")], title="t", x_label="step", y_label="y")
    (path,) = re.findall(r'points="([^"]+)"', chart)
    pairs = [tuple(map(float, pair.split(","))) for pair in path.split()]
    assert len(pairs) <= 700
    assert min(y for _, y in pairs) < 60 < max(y for _, y in pairs)
    assert "nan" not in chart


def test_a_line_is_drawn_to_scale() -> None:
    chart = line_chart(
        [Series("a", [(0, 0), (10, 100)], "s1")],
        title="t", x_label="x", y_label="y", from_zero=True, width=274, height=166,
        marks=[Mark(5, "m<", "why")], levels=[Level(53, "half")],
    )  # fmt: skip
    assert 'points="58.0,128.0 258.0,28.0"' in chart.replace("28.0", "28.0")
    assert "m&lt;" in chart
    assert 'class="level"' in chart


def test_bars_and_columns() -> None:
    bar = bar_of_parts([("a", 3.0, "c1", "3 s"), ("b", 1.0, "c2", "1 s")], title="t", width=400)
    assert re.findall(r'width="([\d.]+)" height', bar) == ["298.50", "98.50"]
    columns = stacked_columns(
        [("5", [1.0, 3.0])], names=["p", "q"], styles=["c1", "c2"], title="t", y_label="ms"
    )
    heights = [float(height) for height in re.findall(r'height="([\d.]+)"/>', columns)]
    assert heights[1] == pytest.approx(3 * heights[0], rel=1e-3)
    assert "nothing was recorded" in bar_of_parts([], title="t")
