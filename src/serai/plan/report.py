"""``plan.html``: one prediction, its search, cost, goodput and the two redrawn figures, self-contained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from serai.plan.cost import checkpoint_budget, data_budget, training
from serai.plan.figures import announced_comparison, scaling_figure, size_figure
from serai.plan.goodput import GPU_HOURS_BETWEEN_FAILURES, daly_interval, simulate
from serai.plan.predict import Prediction
from serai.plan.search import SearchResult, scaling, sensitivity
from serai.plan.svg import Line, chart, scatter
from serai.units import format_bandwidth, format_bytes, format_duration

__all__ = ["budget", "layout_text", "render"]

_STYLE = """
:root{color-scheme:light dark;--ink:#1c1e21;--soft:#5d6570;--line:#d9dde2;--paper:#fff;--c1:#2563a8;--c2:#b3421a;--c3:#7a828c}
@media(prefers-color-scheme:dark){:root{--ink:#e8eaed;--soft:#a0a8b2;--line:#383e46;--paper:#16181b;--c1:#7ab0ea;--c2:#f0966c;--c3:#949ca6}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin-top:2.2rem}p.soft,td.soft{color:var(--soft)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}th,td{text-align:left;padding:.25rem .6rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap}.wide{overflow-x:auto}figure{margin:1rem 0}figcaption span{margin-right:1.4rem;color:var(--soft)}figcaption i{display:inline-block;width:.8rem;height:.8rem;border-radius:50%;margin-right:.4rem}
svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:var(--soft)}svg text.title{fill:var(--ink)}.grid{stroke:var(--line)}.axis{stroke:var(--soft)}.line{fill:none;stroke-width:2}.band{stroke:none;opacity:.18}
.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3);stroke-dasharray:5 5}.mark.c1,.band.c1{fill:var(--c1)}.mark.c2,.band.c2{fill:var(--c2)}.mark.c3,.band.c3{fill:var(--c3)}
i.c1{background:var(--c1)}i.c2{background:var(--c2)}i.c3{background:var(--c3)}.warn{color:var(--c2)}
"""


def layout_text(p: Prediction) -> str:
    """One line that names a layout: parallel sizes that are not 1, batch, policy."""
    layout = p.layout
    parts = [f"dp {p.data_parallel}"]
    parts += [
        f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(layout, name) > 1
    ]
    if layout.virtual_pp > 1:
        parts.append(f"virtual {layout.virtual_pp}")
    parts += [f"ZeRO-{p.zero}", f"batch {layout.micro_batch} × {layout.grad_accum}"]
    if layout.recompute != "none":
        parts.append(f"recompute {layout.recompute}")
    if layout.offload:
        parts.append(f"offload {layout.offload}")
    return " · ".join(parts)


def budget(p: Prediction, *, tokens: float, days: float = 28.0, storage_gbps: float = 20.0) -> dict[str, Any]:
    """Cost, checkpoint, goodput and data of one prediction as a plain document (seconds, bytes, dollars).

    The save stalls training for the copy of one GPU's share over PCIe (an upper bound: it may overlap), and
    a failure costs restart and reload from durable storage.
    """
    store = checkpoint_budget(p, storage_gbps=storage_gbps)
    stall = max(store.copy_s, 0.001)
    mtbf = GPU_HOURS_BETWEEN_FAILURES * 3600 / p.cluster.gpus
    interval = max(daly_interval(stall, mtbf), store.durable_s, p.step_time_s)
    recovery = 120.0 + store.durable_s
    life = simulate(
        gpus=p.cluster.gpus, interval_s=interval, stall_s=stall, recovery_s=recovery, lag_s=store.durable_s, days=days, replicas=32
    )  # fmt: skip
    run = training(p, tokens, goodput=max(life.useful, 1e-6))
    feed = data_budget(p)
    return {
        "tokens": tokens,
        "seconds": run.seconds,
        "seconds_interval": list(run.seconds_interval),
        "gpu_hours": run.gpu_hours,
        "dollars": run.dollars,
        "dollars_interval": None if run.dollars_interval is None else list(run.dollars_interval),
        "dollars_per_gpu_hour": p.cluster.dollars_per_gpu_hour,
        "checkpoint_bytes": store.bytes,
        "checkpoint_bytes_per_node": store.bytes_per_node,
        "checkpoint_fits_host": store.fits_host,
        "save_stall_s": stall,
        "save_durable_s": store.durable_s,
        "save_interval_s": interval,
        "storage_bytes_per_s": store.bytes / interval,
        "failures": life.failures,
        "failure_days": days,
        "mtbf_s": mtbf,
        "goodput": life.useful,
        "goodput_interval": list(life.interval_80),
        "goodput_parts": {"saving": life.saving, "lost": life.lost, "recovering": life.recovering},
        "data_bytes_per_s": feed.bytes_per_s,
        "nodes_per_storage_account": feed.nodes_per_account,
    }


def render(
    p: Prediction, *, found: SearchResult | None = None, tokens: float = 300e9, title: str | None = None
) -> str:
    """The page as text; ``found`` adds the search."""
    head = title or f"{p.model.name or p.model.arch} on {p.cluster.gpus} × {p.cluster.gpu.name}"
    parts = [_summary(p), _terms(p), _budget(budget(p, tokens=tokens))]
    if found is not None:
        parts.append(_search(found))
    parts += [_scaling(p), _sensitivity(p), _figures()]
    body = "\n".join(parts)
    return f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>serai plan: {escape(head)}</title><style>{_STYLE}</style></head><body><h1>{escape(head)}</h1><p class="soft">{escape(layout_text(p))} · profile {escape(p.profile)}</p>{body}</body></html>\n'  # fmt: skip


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), numbers: Sequence[int] = ()) -> str:
    def cell(tag: str, index: int, text: str) -> str:
        mark = ' class="n"' if index in numbers else ""
        return f"<{tag}{mark}>{escape(text)}</{tag}>"

    lines = ["<div class=wide><table>"]
    if head:
        lines.append("<tr>" + "".join(cell("th", i, text) for i, text in enumerate(head)) + "</tr>")
    lines += ["<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows]
    return "".join(lines) + "</table></div>"


def _summary(p: Prediction) -> str:
    low, high = p.step_time_interval_s
    rows = [
        ("fits", "yes" if p.fits else "no"),
        ("step", f"{format_duration(p.step_time_s)} (80 %: {format_duration(low)} – {format_duration(high)})"),
        ("tokens/s", f"{p.tokens_per_s:,.0f} ({p.tokens_per_s_per_gpu:,.0f} a GPU)"),
        ("memory", f"{p.memory_gb:.1f} GB of {p.cluster.memory_gb:.4g} GB a GPU"),
        ("MFU, HFU", f"{p.mfu:.1%}, {p.hfu:.1%} of the data-sheet peak for {p.layout.precision}"),
        ("TFLOPs a GPU", f"{p.tflops_per_gpu:.1f} model, {p.tflops('causal'):.1f} causal, {p.tflops('hardware'):.1f} with a recomputed forward"),
        ("formula", p.flops_formula),
    ]  # fmt: skip
    said = "".join(f'<p class="warn">{escape(text)}</p>' for text in p.warnings)
    return _table(rows) + said


def _terms(p: Prediction) -> str:
    times = [
        (t.name, format_duration(t.value), f"{t.value / p.step_time_s:.1%}", t.formula)
        for t in p.terms
        if t.kind == "time" and t.value > 0
    ]
    memory = [
        (t.name, f"{t.value:.2f} GB", f"{t.value / p.memory_gb:.1%}", t.formula)
        for t in p.terms
        if t.kind == "memory" and t.value > 0
    ]
    classes = ", ".join(f"{name} {value:.1f} GB" for name, value in p.memory_by_class.items())
    head = ("term", "value", "share", "formula")
    return f"<h2>Where the step goes</h2>{_table(times, head, (1, 2))}<h2>Where the memory goes</h2>{_table(memory, head, (1, 2))}<p class=soft>by class of rank: {escape(classes)}</p>"  # fmt: skip


def _budget(b: dict[str, Any]) -> str:
    low, high = b["seconds_interval"]
    rows = [
        (f"{b['tokens']:.3g} tokens", f"{b['seconds'] / 86400:.1f} days (80 %: {low / 86400:.1f} – {high / 86400:.1f}), {b['gpu_hours']:,.0f} GPU-hours"),
        ("cost", "no price in the catalogue" if b["dollars"] is None else f"${b['dollars']:,.0f} at ${b['dollars_per_gpu_hour']:.2f} a GPU-hour (list price, an assumption)"),
        ("goodput", f"{b['goodput']:.1%} (80 % of runs: {b['goodput_interval'][0]:.1%} – {b['goodput_interval'][1]:.1%}), {b['failures']:.1f} failures in {b['failure_days']:.0f} days"),
        ("checkpoint", f"{format_bytes(b['checkpoint_bytes'])}, {format_bytes(b['checkpoint_bytes_per_node'])} a node, every {format_duration(b['save_interval_s'])}"),
        ("durable storage", f"{format_bandwidth(b['storage_bytes_per_s'])} in the mean; one save is durable after {format_duration(b['save_durable_s'])}"),
        ("stall a save", f"at most {format_duration(b['save_stall_s'])} (the copy to host memory)"),
        ("data", f"{format_bandwidth(b['data_bytes_per_s'])}; one storage account of 60 Gb/s feeds {b['nodes_per_storage_account']:,} nodes"),
    ]  # fmt: skip
    return f"<h2>Beyond a step</h2>{_table(rows)}"


def _search(found: SearchResult) -> str:
    rows = [
        (
            layout_text(p),
            format_duration(p.step_time_s),
            f"{p.tokens_per_s:,.0f}",
            f"{p.memory_gb:.1f}",
            f"{p.mfu:.1%}",
        )
        for p in found.best
    ]
    lost = [(layout_text(loser.prediction), loser.reason) for loser in found.losers[:20]]
    points = [(p.memory_gb, p.tokens_per_s, "c3") for p in found.best]
    points += [(p.memory_gb, p.tokens_per_s, "c1") for p in found.frontier]
    names = {"c3": "best of each parallel shape", "c1": "Pareto: none is both faster and smaller"}
    picture = scatter(points, names, x_title="GB a GPU", y_title="tokens/s") if points else ""
    head = ("layout", "step", "tokens/s", "GB a GPU", "MFU")
    return f"<h2>Layouts</h2><p class=soft>{found.considered:,} considered in {found.seconds:.1f} s, global batch {found.global_batch}</p>{_table(rows, head, (1, 2, 3, 4))}{picture}<h2>Why the others lose</h2>{_table(lost)}"  # fmt: skip


def _scaling(p: Prediction) -> str:
    counts = sorted({max(1, p.cluster.nodes * factor // 4) for factor in (1, 2, 4, 8, 16)})
    curve = scaling(p.model, p.cluster, p.layout, counts, profile=p.calibration)
    if len(curve) < 2:
        return ""
    lines = [
        Line(
            "predicted, 80 % interval",
            [(float(c.cluster.gpus), c.tokens_per_s) for c in curve],
            "c1",
            [(float(c.cluster.gpus), *c.tokens_per_s_interval) for c in curve],
        )
    ]
    return f"<h2>Weak scaling</h2>{chart(lines, x_title='GPUs', y_title='tokens/s')}"


def _sensitivity(p: Prediction) -> str:
    gains = sensitivity(p.model, p.cluster, p.layout, profile=p.calibration)
    rows = [
        (f"2 × {name}", f"{gain:+.1%}") for name, gain in sorted(gains.items(), key=lambda item: -item[1])
    ]
    return f"<h2>What twice of it would give</h2>{_table(rows, ('part', 'tokens/s'), (1,))}"


def _figures() -> str:
    both = announced_comparison()
    rows = [(name, f"{a:.1%}", f"{b:.1%}") for name, (a, b) in both.shares.items()]
    rows.append(("TFLOPs a GPU, recomputation counted", f"{both.small.tflops('hardware'):.0f}", f"{both.large.tflops('hardware'):.0f}"))  # fmt: skip
    head = ("share of the step", "1T, 512 GPUs, 400 Gb/s a node", "2T, 1024 GPUs, 1600 Gb/s a node")
    return f"<h2>The announced figures, redrawn</h2><h3>(a) Model size, 1024 GPUs, batch 8 a GPU</h3>{size_figure()}<h3>(b) Scaling of 175B, batch 16 a GPU</h3>{scaling_figure()}<h3>2 × model size, 2 × GPUs, 81 → 150 TFLOPs a GPU</h3><p class=soft>The smaller side's recipe was not published; assumed: batch 4 a GPU, optimizer on the host, the same software.</p>{_table(rows, head, (1, 2))}"  # fmt: skip
