"""``report.html``: the report document as one self-contained page, light and dark."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import jinja2

from serai.run.charts import Level, Mark, Series, bar_of_parts, line_chart, stacked_columns
from serai.run.report_data import STALL_TERMS
from serai.units import format_bytes, format_duration

__all__ = ["render"]

_TIME_PARTS = (
    ("compute", "compute", "c1"),
    ("data_wait", "data wait", "c4"),
    ("evaluate", "evaluate", "c9"),
    ("checkpoint_stall", "checkpoint stall", "c5"),
    ("repeated", "repeated steps", "c3"),
    ("restart", "restart", "c6"),
    ("start", "start", "c2"),
    ("prepare", "prepare", "c7"),
    ("other", "other", "c8"),
)
_TERM_NAMES = ("call", "gate", "step inflation", "back-pressure", "finalise")
_TERM_STYLES = ("c1", "c2", "c3", "c4", "c5")


def render(document: dict[str, Any]) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = lambda value: "–" if value is None else format_duration(float(value))
    environment.filters["bytes"] = lambda value: "–" if value is None else format_bytes(float(value))
    environment.filters["clock"] = _clock
    environment.filters["count"] = lambda value: "–" if value is None else f"{int(value):,}"
    return environment.get_template("report.html.j2").render(
        d=document,
        loss_chart=_loss_chart(document),
        speed_chart=_speed_chart(document),
        time_chart=_time_chart(document),
        time_rows=_time_rows(document),
        stall_chart=_stall_chart(document),
        stall_terms=list(zip(STALL_TERMS, _TERM_NAMES, strict=True)),
    )


def _clock(value: float | None) -> str:
    return "–" if value is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))


def _points(entries: list[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return [
        (float(entry["step"]), float(entry[key]))
        for entry in entries
        if isinstance(entry.get(key), (int, float))
    ]


def _marks(document: dict[str, Any]) -> list[Mark]:
    """Where attempts resumed: at the step that each one restored; one mark for several at one step."""
    marks: dict[int, Mark] = {}
    counts: dict[int, int] = {}
    for before, entry in itertools.pairwise(document["attempts"]):
        step = entry["restored_step"]
        if step is None:
            continue
        counts[step] = counts.get(step, 0) + 1
        why = before["message"] or before["status"]
        title = f"attempt {entry['attempt']} resumed from step {step} ({entry['tier'] or 'unknown'} tier) after: {why}"
        failed = before["status"] == "failed"
        known = marks.get(step)
        marks[step] = Mark(
            x=float(step),
            label="resumed" if counts[step] == 1 else f"resumed × {counts[step]}",
            title=title if known is None else f"{known.title}\n{title}",
            style="mark failed" if failed or (known is not None and "failed" in known.style) else "mark",
        )
    return list(marks.values())


def _smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Centred running mean over about a thirtieth of the run."""
    reach = max(1, len(points) // 60)
    smooth = []
    for index, (x, _) in enumerate(points):
        window = points[max(0, index - reach) : index + reach + 1]
        smooth.append((x, sum(y for _, y in window) / len(window)))
    return smooth


def _loss_chart(document: dict[str, Any]) -> str:
    losses = _points(document["steps"], "loss")
    entropy = document["progress"]["unigram_entropy"]
    series = [Series("training loss", losses, "raw")]
    if len(losses) > 60:
        series.append(Series("training loss, smoothed", _smooth(losses), "s1"))
    series.append(Series("validation loss", _points(document["evaluations"], "loss"), "s2", dots=True))
    return line_chart(
        series,
        title="loss",
        x_label="step",
        y_label="loss (nats a token)",
        marks=_marks(document),
        levels=[Level(entropy, f"unigram entropy {entropy:.3f}")]
        if isinstance(entropy, (int, float))
        else [],
        height=360,
    )


def _speed_chart(document: dict[str, Any]) -> str:
    return line_chart(
        [Series("tokens/s", _points(document["steps"], "tokens_per_s"), "s3")],
        title="speed",
        x_label="step",
        y_label="tokens/s",
        marks=_marks(document),
        from_zero=True,
        height=220,
    )


def _time_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    spent = document["time"]
    total = spent["total"] or 1.0
    return [
        {"name": name, "style": style, "seconds": spent[key], "share": spent[key] / total}
        for key, name, style in _TIME_PARTS
        if spent[key] > 0
    ]


def _time_chart(document: dict[str, Any]) -> str:
    parts = [
        (row["name"], row["seconds"], row["style"], format_duration(row["seconds"]))
        for row in _time_rows(document)
    ]
    return bar_of_parts(parts, title="where the time went")


def _stall_chart(document: dict[str, Any]) -> str:
    columns = [
        (str(entry["step"]), [1e3 * entry[term] for term in STALL_TERMS]) for entry in document["checkpoints"]
    ]
    return stacked_columns(
        columns, names=_TERM_NAMES, styles=_TERM_STYLES, title="checkpoint stall", y_label="stall (ms a save)"
    )
