"""Search: what it returns fits, is the fastest, and the others lose for a reason that holds."""

from __future__ import annotations

import itertools
import time

import pytest

from serai.errors import SpecError
from serai.plan import Cluster, Layout, Model, predict, scaling, search, sensitivity
from serai.plan.search import pareto

LLAMA_70B = Model("llama", 80, 8192, 64, 8, 28672, 128256)


def test_a_search_over_1024_gpus() -> None:
    cluster = Cluster.named("nd-h100-v5", 128)
    started = time.monotonic()
    found = search(LLAMA_70B, cluster, seq_len=8192, global_batch=1024)
    assert time.monotonic() - started < 30
    assert found.considered > 300
    best = found.best[0]
    assert best.fits
    assert all(one.fits and one.step_time_s >= best.step_time_s for one in found.best)
    for one in found.best:
        layout = one.layout
        shards = layout.tp * layout.pp * layout.cp
        assert shards * one.data_parallel == 1024
        assert layout.micro_batch * layout.grad_accum * one.data_parallel == 1024
        assert LLAMA_70B.layers % layout.pp == 0
    # ZeRO-1 without model parallelism cannot hold 70 B parameters
    naive = [
        x
        for x in found.losers
        if x.prediction.layout.tp == x.prediction.layout.pp == 1 and x.prediction.zero == 1
    ]
    assert naive
    assert all(x.reason.startswith("does not fit") for x in naive)
    for loser in found.losers:
        assert loser.prediction.fits == loser.reason.startswith("slower")
    shapes = {(p.layout.tp, p.layout.pp, p.layout.cp, p.layout.ep, p.zero) for p in found.best}
    assert len(shapes) == len(found.best)


def test_offloading_only_where_nothing_else_fits() -> None:
    small = search(Model("gpt", 12, 768, 12), Cluster.named("rtx-4090", 1, 1), global_batch=8, seq_len=1024)
    assert small.best[0].layout.offload is None
    large = search(Model("gpt", 32, 4096, 32), Cluster.named("rtx-4090", 1, 1), global_batch=8, seq_len=1024)
    assert large.best[0].layout.offload is not None
    assert large.best[0].fits
    never = search(Model("gpt", 96, 12288, 96), Cluster.named("rtx-4090", 1, 1), global_batch=1, seq_len=1024)
    assert not never.best
    assert all(x.reason.startswith("does not fit") for x in never.losers)


def test_a_batch_that_divides_by_nothing() -> None:
    with pytest.raises(SpecError) as caught:
        search(Model("gpt", 7, 768, 12), Cluster.named("v100-16gb", 3, 1), global_batch=5)
    assert caught.value.code == "S137"


def test_pareto_has_no_dominated_point() -> None:
    found = search(LLAMA_70B, Cluster.named("dgx-h100", 8), seq_len=4096, global_batch=512)
    frontier = list(found.frontier)
    assert frontier[0].step_time_s == found.best[0].step_time_s
    for a, b in itertools.pairwise(frontier):
        assert a.step_time_s <= b.step_time_s
        assert a.memory_gb > b.memory_gb
    assert pareto(frontier) == frontier


def test_sensitivity_finds_the_bottleneck() -> None:
    """Micro-batch 1 of ZeRO-3 over slow links waits for the network; a large batch waits for the matrix units."""
    model = Model("gpt", 96, 12288, 96, vocab=51200)
    slow = Cluster.named("ndm-a100-v4", 64, inter_node_gbps=200)
    bound = sensitivity(model, slow, Layout(zero=3, seq_len=1024, precision="fp16", recompute="full"))
    assert max(bound, key=lambda part: bound[part]) == "node network"
    layout = Layout(zero=3, micro_batch=32, seq_len=1024, precision="fp16", recompute="full")
    busy = sensitivity(model, Cluster.named("ndm-a100-v4", 16), layout)
    assert max(busy, key=lambda part: busy[part]) == "matrix units"
    assert all(gain >= -1e-9 for gain in (*bound.values(), *busy.values()))


def test_weak_scaling_leaves_out_what_does_not_divide() -> None:
    curve = scaling(
        LLAMA_70B, Cluster.named("dgx-h100", 8), Layout(tp=8, pp=4, grad_accum=16), [1, 2, 4, 6, 8]
    )
    assert [p.cluster.nodes for p in curve] == [4, 8]
    assert curve[1].tokens_per_s <= 2 * curve[0].tokens_per_s * (1 + 1e-9)
    assert curve[0].step_time_s == predict(LLAMA_70B, Cluster.named("dgx-h100", 4), Layout(tp=8, pp=4, grad_accum=16)).step_time_s  # fmt: skip
