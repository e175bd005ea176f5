"""The error table: predicted against published, by source. ``python -m serai.plan.check [FOLDER]``.

Three columns of the same rows: ``fitted`` (the profile fitted on the source), ``unnamed`` (what ``predict``
takes when nobody names a profile) and ``left out`` (all constants fitted again without the source).
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serai.plan.predict import Prediction, predict
from serai.plan.profiles import Profile, load_profile, profile_names
from serai.plan.published import Row, own_table, read_folder, read_rows
from serai.plan.refit import Fitted, between_sources, left_out_fits, with_between

__all__ = ["Report", "check", "main", "render"]


@dataclass(frozen=True)
class Line:
    """Errors of one source in one column. ``mean`` and ``worst`` are |predicted/measured − 1|."""

    source: str
    profile: str
    rows: int
    mean: float
    bias: float
    worst: float
    coverage: float


@dataclass(frozen=True)
class Report:
    """Everything the check prints."""

    folder: str
    fitted: tuple[Line, ...]
    unnamed: tuple[Line, ...]
    left_out: tuple[Line, ...]
    coverage: dict[str, float]
    headline: tuple[dict[str, Any], ...]
    memory: tuple[dict[str, Any], ...]
    out_of_memory: tuple[dict[str, Any], ...]
    between: float

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": 1, **asdict(self)}


def _line(source: str, pairs: Sequence[tuple[Row, Prediction]]) -> Line:
    ratio = np.array([p.step_time_s / (row.step_time_s or 1.0) for row, p in pairs])
    inside = [
        p.step_time_interval_s[0] <= (row.step_time_s or 0) <= p.step_time_interval_s[1] for row, p in pairs
    ]
    size = np.abs(ratio - 1)
    names = sorted({p.profile for _, p in pairs})
    return Line(
        source, ", ".join(names), len(pairs), float(size.mean()), float(np.log(ratio).mean()), float(size.max()), float(np.mean(inside))
    )  # fmt: skip


def _column(rows: Sequence[Row], chosen: dict[int, tuple[Profile, bool]]) -> tuple[tuple[Line, ...], float]:
    by_source: dict[str, list[tuple[Row, Prediction]]] = defaultdict(list)
    hits = 0
    for index, row in enumerate(rows):
        profile, named = chosen[index]
        p = predict(row.model, row.cluster, row.layout, profile=profile, named=named)
        by_source[row.source].append((row, p))
        hits += p.step_time_interval_s[0] <= (row.step_time_s or 0) <= p.step_time_interval_s[1]
    return tuple(_line(source, pairs) for source, pairs in sorted(by_source.items())), hits / len(rows)


def check(folder: Path | None = None) -> Report:
    """Compare with ``folder``'s rows, or with the package's own table.

    ``fitted`` and ``unnamed`` use the package's profiles as they are; ``left out`` fits again, on these rows
    alone, once for every source.
    """
    rows = read_folder(folder) if folder else list(read_rows(own_table()))
    lefts = left_out_fits(rows)
    between = between_sources(rows, lefts)
    lefts = {source: with_between(fitted, between) for source, fitted in lefts.items()}
    fit = Fitted({name: load_profile(name) for name in profile_names()})
    with_time = [row for row in rows if row.step_time_s and row.headline is None]
    columns = {
        "fitted": _column(with_time, {i: (fit.own(row), True) for i, row in enumerate(with_time)}),
        "unnamed": _column(with_time, {i: (fit.chosen(row), False) for i, row in enumerate(with_time)}),
        "left out": _column(
            with_time, {i: (lefts[row.source].chosen(row), False) for i, row in enumerate(with_time)}
        ),
    }
    headline = []
    for row in rows:
        if row.headline is not None:
            p = predict(row.model, row.cluster, row.layout, profile=fit.own(row))
            got = p.tflops("hardware")
            low, high = p.step_time_interval_s
            headline.append({
                "row": row.label, "published_tflops": row.headline, "predicted_tflops": got, "error": got / row.headline - 1,
                "interval_tflops": [got * p.step_time_s / high, got * p.step_time_s / low], "fits": p.fits,
            })  # fmt: skip
    memory = []
    no_memory = []
    for row in rows:
        profile = fit.own(row)
        p = predict(row.model, row.cluster, row.layout, profile=profile)
        if row.out_of_memory:
            no_memory.append({"row": row.label, "predicted_gb": p.memory_gb, "capacity_gb": row.cluster.memory_gb, "predicted_oom": not p.fits})  # fmt: skip
        elif row.memory_gb is not None:
            got = p.memory_gb
            if "MaxMemAllocated" in row.memory_kind or row.analytic_memory:
                got -= profile.memory.context_gb  # the allocator's own count, or a formula: no context in it
            memory.append({"source": row.source, "row": row.label, "measured": not row.analytic_memory, "published_gb": row.memory_gb, "predicted_gb": got, "error": got / row.memory_gb - 1})  # fmt: skip
    return Report(
        str(folder or "the package's own table"),
        columns["fitted"][0],
        columns["unnamed"][0],
        columns["left out"][0],
        {name: share for name, (_, share) in columns.items()},
        tuple(headline),
        tuple(memory),
        tuple(no_memory),
        between,
    )


def render(report: Report) -> str:
    """The tables as text."""
    out = [f"Step time, predicted against {report.folder}"]
    out.append(
        f"{'source':24}{'rows':>6}{'fitted':>9}{'80 % in':>9}{'unnamed':>9}{'80 % in':>9}{'left out':>10}{'bias':>8}{'80 % in':>9}"
    )
    for a, b, c in zip(report.fitted, report.unnamed, report.left_out, strict=True):
        out.append(
            f"{a.source:24}{a.rows:6d}{a.mean:9.1%}{a.coverage:9.0%}{b.mean:9.1%}{b.coverage:9.0%}{c.mean:10.1%}{c.bias:+8.2f}{c.coverage:9.0%}"
        )
    share = report.coverage
    out.append(f"{'all rows':24}{sum(x.rows for x in report.fitted):6d}{'':9}{share['fitted']:9.0%}{'':9}{share['unnamed']:9.0%}{'':18}{share['left out']:9.0%}")  # fmt: skip
    out.append(
        "fitted, unnamed, left out: mean |predicted/published − 1|; bias: mean log(predicted/published)"
    )
    out += ["", "Headline points (TFLOPs/GPU, recomputation counted; never fitted on)"]
    for h in report.headline:
        low, high = h["interval_tflops"]
        out.append(f"  {h['row']:44} published {h['published_tflops']:6.1f}  predicted {h['predicted_tflops']:6.1f}  {h['error']:+6.1%}  80 %: {low:.0f}–{high:.0f}  fits: {h['fits']}")  # fmt: skip
    out += ["", "Memory (GB a GPU)"]
    groups: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for m in report.memory:
        groups[m["source"], m["measured"]].append(m["error"])
    for (source, measured), errors in sorted(groups.items()):
        out.append(f"  {source:24}{'measured' if measured else 'analytic':10}{len(errors):5d} rows  mean |error| {np.abs(errors).mean():6.1%}  bias {np.mean(errors):+6.1%}")  # fmt: skip
    every = [m["error"] for m in report.memory if m["measured"]]
    if every:
        out.append(f"  {'all measured':34}{len(every):5d} rows  mean |error| {np.abs(every).mean():6.1%}")
    out += ["", "Published out-of-memory rows"]
    for o in report.out_of_memory:
        out.append(f"  {o['row']:52} {o['predicted_gb']:6.1f} of {o['capacity_gb']:g} GB  {'predicted' if o['predicted_oom'] else 'NOT predicted'}")  # fmt: skip
    return "\n".join(out)


def main(arguments: Sequence[str] | None = None) -> int:
    values = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in values
    places = [value for value in values if value != "--json"]
    report = check(Path(places[0]) if places else None)
    print(json.dumps(report.to_json()) if as_json else render(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
