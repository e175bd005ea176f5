"""Search the layouts of a model on a cluster: the best that fit, and why the others lose."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from serai.errors import SpecError
from serai.plan.cluster import Cluster
from serai.plan.layout import Layout
from serai.plan.model import Model
from serai.plan.predict import Prediction, predict
from serai.plan.profiles import Profile

__all__ = ["Loser", "SearchResult", "pareto", "scaling", "search", "sensitivity"]


@dataclass(frozen=True)
class Loser:
    """A layout that lost, and why: ``reason`` names memory or the term that costs most against the winner."""

    prediction: Prediction
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """``best`` first by tokens/s among those that fit (one a parallel shape); ``losers`` by how near they came."""

    best: tuple[Prediction, ...]
    losers: tuple[Loser, ...]
    frontier: tuple[Prediction, ...]
    considered: int
    reasons: dict[str, int]
    global_batch: int
    seconds: float


def search(
    model: Model,
    cluster: Cluster,
    *,
    global_batch: int | None = None,
    seq_len: int = 2048,
    precision: str = "bf16",
    limit: int = 10,
    profile: str | Profile | None = None,
    offload: Sequence[str | None] = (None, "optimizer", "all"),
    recompute: Sequence[str] = ("none", "selective", "full"),
) -> SearchResult:
    """Every sensible layout of ``cluster`` for a global batch of ``global_batch`` sequences.

    The batch defaults to about four million tokens, at least one sequence a GPU. Offloading is tried only
    where nothing fits without it. Raises ``SpecError`` S137 when the batch divides by no layout.
    """
    started = time.monotonic()
    gpus = cluster.gpus
    if global_batch is None:
        global_batch = gpus * max(1, round(4_194_304 / seq_len / gpus))
    tried: list[Prediction] = []
    fitting: list[Prediction] = []
    for way in offload:
        for layout in _layouts(model, cluster, global_batch, seq_len, precision, way, recompute):
            one = predict(model, cluster, layout, profile=profile)
            tried.append(one)
            if one.fits:
                fitting.append(one)
        if fitting:
            break
    if not tried:
        raise SpecError(
            f"no layout of {gpus} GPUs divides a global batch of {global_batch} sequences",
            code="S137",
            where="search",
            expected="a batch that data parallelism divides",
            next_step=f"use a multiple of {gpus} sequences, or fewer GPUs",
        )
    fitting.sort(key=lambda one: (one.step_time_s, one.memory_gb))
    best = _one_a_shape(fitting)[:limit]
    losers = _losers(tried, best)
    return SearchResult(
        tuple(best),
        tuple(losers),
        tuple(pareto(fitting)),
        len(tried),
        dict(Counter(loser.reason.split(":")[0] for loser in losers)),
        global_batch,
        time.monotonic() - started,
    )


def _divisors(number: int, most: int) -> list[int]:
    return [value for value in range(1, min(number, most) + 1) if number % value == 0]


def _layouts(
    model: Model,
    cluster: Cluster,
    batch: int,
    seq_len: int,
    precision: str,
    offload: str | None,
    recompute: Sequence[str],
) -> Iterator[Layout]:
    gpus = cluster.gpus
    kv_heads = model.kv_heads or model.heads
    for tp in (value for value in (1, 2, 4, 8) if value <= cluster.domain and gpus % value == 0):
        if model.heads % tp or max(kv_heads, tp) % min(kv_heads, tp):
            continue
        for pp in _divisors(gpus // tp, min(model.layers, 64)):
            if pp > 1 and (model.layers % pp or offload == "all"):
                continue
            for cp in (1, 2, 4, 8) if seq_len >= 8192 else (1,):
                shards = tp * pp * cp
                if gpus % shards or (cp > 1 and seq_len % (2 * cp)):
                    continue
                dp = gpus // shards
                if batch % dp:
                    continue
                for ep in _experts(model, gpus // pp):
                    for micro in (1, 2, 4, 8, 16, 32):
                        if (batch // dp) % micro:
                            continue
                        accum = batch // dp // micro
                        if pp > 1 and accum < pp:
                            continue
                        for zero in (0,) if dp * cp == 1 else (1, 3) if pp == 1 else (1,):
                            for chunks in _chunks(model.layers // pp) if pp > 1 else (1,):
                                for policy in recompute:
                                    yield Layout(
                                        zero=zero, tp=tp, pp=pp, virtual_pp=chunks, cp=cp, ep=ep, micro_batch=micro,
                                        grad_accum=accum, seq_len=seq_len, precision=precision, recompute=policy,
                                        offload=offload,
                                    )  # fmt: skip


def _chunks(layers: int) -> list[int]:
    """Interleaved stages worth trying: none, a middle one, one layer each."""
    values = _divisors(layers, 16)
    return sorted({1, values[len(values) // 2], values[-1]})


def _experts(model: Model, stage: int) -> list[int]:
    if model.experts <= 1:
        return [1]
    return [ep for ep in (1, 2, 4, 8, 16, 32, 64, 128) if model.experts % ep == 0 and stage % ep == 0]


def _one_a_shape(ranked: Sequence[Prediction]) -> list[Prediction]:
    seen: set[tuple[int, ...]] = set()
    kept: list[Prediction] = []
    for one in ranked:
        shape = (one.layout.tp, one.layout.pp, one.layout.cp, one.layout.ep, one.zero)
        if shape not in seen:
            seen.add(shape)
            kept.append(one)
    return kept


def _losers(tried: Sequence[Prediction], best: Sequence[Prediction]) -> list[Loser]:
    """For each parallel shape that is not in ``best``, or lost to it, its best attempt and the reason."""
    winner = best[0] if best else None
    shown = {(one.layout, one.zero) for one in best[:1]}
    nearest = _one_a_shape(
        sorted(tried, key=lambda one: (not one.fits, one.step_time_s if one.fits else one.memory_gb))
    )
    return [Loser(one, _reason(one, winner)) for one in nearest if (one.layout, one.zero) not in shown]


def _reason(one: Prediction, winner: Prediction | None) -> str:
    if not one.fits:
        most = max(one.memory_terms().items(), key=lambda item: item[1])
        return (
            f"does not fit: {one.memory_gb:.0f} of {one.cluster.memory_gb:.4g} GB, {most[0]} {most[1]:.0f} GB"
        )
    if winner is None:
        return "slower: nothing to compare with"
    mine, theirs = one.time_terms(), winner.time_terms()
    name = max(mine, key=lambda term: mine[term] - theirs.get(term, 0.0))
    slower = one.step_time_s / winner.step_time_s - 1
    extra = mine[name] - theirs.get(name, 0.0)
    return f"slower through {name}: {slower:.0%} behind, {extra:.2f} s more of it a step"


def pareto(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Those that no other beats in both memory and speed, fastest first."""
    frontier: list[Prediction] = []
    for one in sorted(predictions, key=lambda p: (p.step_time_s, p.memory_gb)):
        if not frontier or one.memory_gb < frontier[-1].memory_gb - 1e-9:
            frontier.append(one)
    return frontier


def sensitivity(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    *,
    factor: float = 2.0,
    profile: str | Profile | None = None,
) -> dict[str, float]:
    """Relative gain in tokens/s when one part of the cluster is ``factor`` times as fast."""
    base = predict(model, cluster, layout, profile=profile).tokens_per_s
    parts = {
        "node network": {"inter_node_gbps": cluster.inter_node_gbps * factor},
        "NVLink": {"intra_node_gbps": cluster.intra_node_gbps * factor},
        "HBM": {"hbm_gbps": cluster.hbm_gbps * factor},
        "PCIe": {"pcie_gbps": cluster.pcie_gbps * factor},
        "host DRAM": {"host_dram_gbps": cluster.host_dram_gbps * factor},
    }
    gains = {
        name: predict(model, cluster.replace(**change), layout, profile=profile).tokens_per_s / base - 1
        for name, change in parts.items()
    }
    gpu = cluster.gpu.faster(factor)
    gains["matrix units"] = (
        predict(model, cluster.replace(gpu=gpu), layout, profile=profile).tokens_per_s / base - 1
    )
    return gains


def scaling(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    nodes: Sequence[int],
    *,
    profile: str | Profile | None = None,
) -> list[Prediction]:
    """Weak scaling: the same work a GPU on each number of nodes. Sizes that do not divide are left out."""
    out: list[Prediction] = []
    for count in nodes:
        sized = cluster.replace(nodes=count)
        if sized.gpus % (layout.tp * layout.pp * layout.cp) == 0:
            out.append(predict(model, sized, layout, profile=profile))
    return out
