"""``predict``: memory, step time, throughput and utilisation of a model on a cluster in a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp

from serai.plan.cluster import Cluster
from serai.plan.layout import Layout
from serai.plan.memory import MemoryTerm, host_bytes, memory_by_class
from serai.plan.model import Model
from serai.plan.profiles import Profile, choose_profile, coordinates, load_profile
from serai.plan.step import step_terms

__all__ = ["Prediction", "Term", "predict"]

_FORMULAS = {
    "model": "model FLOPs, full attention, no recomputation: 3·(2·linear weights + 4·s·q per layer + 2·h·V) a token",
    "causal": "model FLOPs, half the attention, no recomputation",
    "hardware": "model FLOPs + one more forward of the layers (96·B·L·s·h²·(1+s/6h+V/16Lh)): full recomputation counted",
}


@dataclass(frozen=True)
class Term:
    """One additive part of the step time (``kind`` time, seconds) or of the worst class's memory (memory, GB)."""

    name: str
    kind: str
    value: float
    unit: str
    formula: str


@dataclass(frozen=True)
class Prediction:
    """What a step takes and needs. Times in seconds, memory in 10^9 bytes, rates per second.

    The ``terms`` of kind time add up to ``step_time_s``, those of kind memory to ``memory_gb``.
    ``mfu`` and ``hfu`` are shares of the data-sheet peak of the layout's precision; ``mfu`` counts model
    FLOPs with full attention, ``hfu`` adds what is recomputed.
    """

    model: Model
    cluster: Cluster
    layout: Layout
    zero: int
    data_parallel: int
    step_time_s: float
    step_time_interval_s: tuple[float, float]
    memory_gb: float
    memory_by_class: Mapping[str, float] = field(hash=False)
    fits: bool
    tokens_per_s: float
    mfu: float
    hfu: float
    tflops_per_gpu: float
    flops_formula: str
    terms: tuple[Term, ...]
    warnings: tuple[str, ...]
    profile: str
    host_memory_gb: float
    samples_per_s: float
    calibration: Profile = field(repr=False, compare=False)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.cluster.gpus

    @property
    def tokens_per_step(self) -> int:
        return self.layout.micro_batch * self.layout.grad_accum * self.data_parallel * self.layout.seq_len

    @property
    def tokens_per_s_interval(self) -> tuple[float, float]:
        low, high = self.step_time_interval_s
        return self.tokens_per_step / high, self.tokens_per_step / low

    def tflops(self, convention: str = "model") -> float:
        """TFLOP/s a GPU (10^12) in one of the published conventions: ``model``, ``causal``, ``hardware``."""
        flops = self.model.flops_per_token(self.layout.seq_len, convention=convention)
        return flops * self.tokens_per_s / self.cluster.gpus / 1e12

    def time_terms(self) -> dict[str, float]:
        return {term.name: term.value for term in self.terms if term.kind == "time"}

    def memory_terms(self) -> dict[str, float]:
        return {term.name: term.value for term in self.terms if term.kind == "memory"}


def predict(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    *,
    profile: str | Profile | None = None,
    named: bool | None = None,
) -> Prediction:
    """Predict one training step.

    ``profile`` names a calibration profile (or is one); by default the one nearest to the hardware and the
    layout's style is taken. ``named`` says whether the profile is known to be this very software (default:
    whether one was given): the interval is narrower then. Never raises for what merely does not fit (``fits`` is False); raises
    ``SpecError`` for what cannot exist: a world size that does not divide.
    """
    dp = layout.data_parallel(cluster.gpus)
    if layout.zero is None:
        return _choose_zero(model, cluster, layout, profile, named, dp)
    zero = layout.zero
    named = (profile is not None) if named is None else named
    if profile is None:
        profile = choose_profile(cluster, layout)
    used = load_profile(profile) if isinstance(profile, str) else profile

    parts = step_terms(model, cluster, layout, used.constants, zero)
    step = sum(part.seconds for part in parts)
    classes = memory_by_class(model, cluster, layout, used.memory, zero)
    totals = {name: sum(term.bytes for term in terms) / 1e9 for name, terms in classes.items()}
    worst = max(totals, key=lambda name: totals[name])
    host = host_bytes(model, cluster, layout, zero) / 1e9
    fits = totals[worst] <= cluster.memory_gb and host <= cluster.host_memory_gb

    place = coordinates(model, cluster, layout)
    far = used.outside(place)
    half = used.half_width(place, cluster.gpu.generation, named=named)
    tokens = layout.micro_batch * layout.grad_accum * dp * layout.seq_len
    rate = tokens / step
    flops = model.flops_per_token(layout.seq_len)
    again = _recomputed_flops(model, layout)
    peak = cluster.gpu.peak(layout.family) * cluster.gpus
    terms = [Term(part.name, "time", part.seconds, "s", part.formula) for part in parts]
    terms += [Term(part.name, "memory", part.bytes / 1e9, "GB", part.formula) for part in classes[worst]]
    return Prediction(
        model=model,
        cluster=cluster,
        layout=layout,
        zero=zero,
        data_parallel=dp,
        step_time_s=step,
        step_time_interval_s=(step * exp(-half), step * exp(half)),
        memory_gb=totals[worst],
        memory_by_class=totals,
        fits=fits,
        tokens_per_s=rate,
        mfu=flops * rate / peak,
        hfu=(flops + again) * rate / peak,
        tflops_per_gpu=flops * rate / cluster.gpus / 1e12,
        flops_formula=_FORMULAS["model"],
        terms=tuple(terms),
        warnings=tuple(
            _warnings(model, cluster, layout, used, far, totals[worst], host, classes[worst], zero)
        ),
        profile=used.name,
        host_memory_gb=host,
        samples_per_s=rate / layout.seq_len,
        calibration=used,
    )


def _recomputed_flops(model: Model, layout: Layout) -> float:
    if layout.recompute == "full":
        return model.linear_flops + model.attention_flops(layout.seq_len)
    if layout.recompute == "selective":
        return model.attention_flops(layout.seq_len)
    return 0.0


def _choose_zero(
    model: Model, cluster: Cluster, layout: Layout, profile: str | Profile | None, named: bool | None, dp: int
) -> Prediction:
    """The lowest ZeRO stage that fits, beginning with 1 (which costs nothing); the smallest memory if none does."""
    stages = (1, 2, 3) if dp * layout.cp > 1 else (0,)
    tried: list[Prediction] = []
    for stage in stages:
        tried.append(predict(model, cluster, layout.replace(zero=stage), profile=profile, named=named))
        if tried[-1].fits:
            return tried[-1]
    return min(tried, key=lambda one: one.memory_gb)


def _warnings(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    profile: Profile,
    far: Mapping[str, float],
    memory: float,
    host: float,
    worst: list[MemoryTerm],
    zero: int,
) -> list[str]:
    said: list[str] = []
    if profile.name == "default":
        said.append(
            f"{cluster.gpu.name} with this kind of layout was never measured here: data-sheet rates and average software"
        )
    for name, doublings in sorted(far.items(), key=lambda item: -item[1]):
        said.append(
            f"{name} lies {doublings:.1f} doublings outside what {profile.name} was calibrated on: the interval is wider"
        )
    if memory > cluster.memory_gb:
        most = max(worst, key=lambda term: term.bytes)
        said.append(
            f"does not fit: {memory:.1f} GB of {cluster.memory_gb:.4g} GB a GPU; most is {most.name} with {most.bytes / 1e9:.1f} GB"
        )
    elif memory > 0.92 * cluster.memory_gb:
        said.append(f"tight: {memory:.1f} GB of {cluster.memory_gb:.4g} GB a GPU")
    if host > cluster.host_memory_gb:
        said.append(f"does not fit: {host:.0f} GB of host memory of {cluster.host_memory_gb:.4g} GB a node")
    if layout.family in ("fp8", "fp4") and layout.family not in cluster.gpu.tflops:
        said.append(f"{cluster.gpu.name} has no {layout.precision} units: computed at the next wider rate")
    if layout.tp > 1 and (model.heads % layout.tp or model.width % layout.tp):
        said.append(f"tp {layout.tp} does not divide {model.heads} heads and an MLP of {model.width}")
    if layout.tp > cluster.domain:
        said.append(f"tp {layout.tp} leaves the {cluster.domain} GPUs of one NVLink domain")
    if layout.pp > 1 and layout.grad_accum < layout.pp:
        said.append(f"{layout.grad_accum} micro-batches do not fill {layout.pp} pipeline stages")
    if layout.pp * layout.virtual_pp > model.layers:
        said.append(f"{model.layers} layers are fewer than {layout.pp} stages × {layout.virtual_pp}")
    if zero == 3 and layout.pp > 1:
        said.append("ZeRO-3 gathers its weights again for every micro-batch of the pipeline")
    return said
