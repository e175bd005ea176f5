"""The two figures of the announced stack, redrawn from predictions beside what was published."""

from __future__ import annotations

from dataclasses import dataclass

from serai.plan.cluster import Cluster
from serai.plan.layout import Layout
from serai.plan.model import Model
from serai.plan.predict import Prediction, predict
from serai.plan.published import Row, own_table, read_rows
from serai.plan.svg import Line, chart

__all__ = ["Comparison", "announced_comparison", "headline_model", "scaling_figure", "size_figure"]

#: Announced shapes: billions of parameters → (layers, hidden, heads).
_SHAPES = {175: (96, 12288, 96), 530: (105, 20480, 128), 1000: (128, 25600, 160), 2000: (160, 32768, 128)}
_STEP = Layout(zero=3, micro_batch=8, seq_len=1024, precision="fp16", recompute="full")


def headline_model(billions: int) -> Model:
    """GPT of 175, 530, 1000 or 2000 billion parameters, as announced."""
    layers, hidden, heads = _SHAPES[billions]
    return Model(
        "gpt", layers, hidden, heads, heads, 4 * hidden, 51200, positions=1024, name=f"GPT-{billions}B"
    )


def headline_layout(billions: int, micro_batch: int = 8) -> Layout:
    """The announced recipe: ZeRO-3, full recomputation; 1T with its optimizer on the host, 2T with all."""
    offload = {1000: "optimizer", 2000: "all"}.get(billions)
    return _STEP.replace(offload=offload, micro_batch=micro_batch)


def _published() -> list[Row]:
    return [row for row in read_rows(own_table()) if row.source == "deepspeed_azure_2022" and row.step_time_s]


def _hardware(row: Row) -> float:
    tokens = row.layout.micro_batch * row.layout.grad_accum * row.layout.seq_len
    flops = row.model.flops_per_token(row.layout.seq_len, convention="hardware")
    return flops * tokens / (row.step_time_s or 1.0) / 1e12


def _band(x: float, p: Prediction) -> tuple[float, float, float]:
    low, high = p.step_time_interval_s
    rate = p.tflops("hardware")
    return x, rate * p.step_time_s / high, rate * p.step_time_s / low


def size_figure(nodes: int = 128) -> str:
    """(a) TFLOPs a GPU against model size, batch 8 a GPU, 1024 GPUs: predicted with interval, published points."""
    cluster = Cluster.named("ndm-a100-v4", nodes)
    found = {
        billions: predict(headline_model(billions), cluster, headline_layout(billions))
        for billions in _SHAPES
    }
    published = [
        (round(row.model.params / 1e9), _hardware(row))
        for row in _published()
        if row.cluster.gpus == cluster.gpus and row.layout.micro_batch == 8 and row.layout.seq_len == 1024
    ]
    sizes = {b: p.model.params / 1e9 for b, p in found.items()}
    lines = [
        Line("predicted, 80 % interval", [(sizes[b], p.tflops("hardware")) for b, p in found.items()], "c1", [_band(sizes[b], p) for b, p in found.items()]),
        Line("published", published, "c2", marks_only=True),
    ]  # fmt: skip
    names = {sizes[b]: f"{b}B" if b < 1000 else f"{b // 1000}T" for b in found}
    return chart(
        lines, x_title="parameters", y_title="TFLOPs a GPU, recomputation counted", log_x=True, x_names=names
    )


def scaling_figure(micro_batch: int = 16) -> str:
    """(b) petaFLOPs of the whole cluster against GPUs, 175B, batch 16 a GPU."""
    model = headline_model(175)
    found = [
        predict(model, Cluster.named("ndm-a100-v4", nodes), headline_layout(175, micro_batch))
        for nodes in (16, 32, 64, 128)
    ]
    published = [
        (float(row.cluster.gpus), _hardware(row) * row.cluster.gpus / 1e3)
        for row in _published()
        if row.layout.micro_batch == micro_batch and row.layout.seq_len == 1024 and row.headline is None
    ]
    points = [(float(p.cluster.gpus), p.tflops("hardware") * p.cluster.gpus / 1e3) for p in found]
    first = points[0][1] / points[0][0]
    bands = []
    for p in found:
        x, low, high = _band(float(p.cluster.gpus), p)
        bands.append((x, low * x / 1e3, high * x / 1e3))
    lines = [
        Line("predicted, 80 % interval", points, "c1", bands),
        Line("published", published, "c2", marks_only=True),
        Line("linear", [(x, first * x) for x, _ in points], "c3"),
    ]
    return chart(lines, x_title="GPUs", y_title="petaFLOPs, recomputation counted")


@dataclass(frozen=True)
class Comparison:
    """Two predictions of the announced comparison; ``shares`` maps a term to its share of each step."""

    small: Prediction
    large: Prediction
    shares: dict[str, tuple[float, float]]


def announced_comparison() -> Comparison:
    """ "2 × model size, 2 × GPUs, 81 → 150 TFLOPs a GPU", term by term.

    The other side of the announcement was 1T on 512 A100 of another cloud. Its recipe was not published:
    assumed are 400 Gb/s a node, batch 4 a GPU, the same ZeRO-3 with full recomputation and the optimizer on
    the host. Nothing of it was fitted.
    """
    small = predict(
        headline_model(1000),
        Cluster.named("p4d.24xlarge", 64),
        headline_layout(1000, micro_batch=4),
        profile="ndm-a100-v4/deepspeed-2022",
        named=False,
    )
    large = predict(headline_model(2000), Cluster.named("ndm-a100-v4", 128), headline_layout(2000))
    names = list(dict.fromkeys([*small.time_terms(), *large.time_terms()]))
    shares = {
        name: (
            small.time_terms().get(name, 0.0) / small.step_time_s,
            large.time_terms().get(name, 0.0) / large.step_time_s,
        )
        for name in names
    }
    return Comparison(small, large, {k: v for k, v in shares.items() if max(v) > 0.002})
