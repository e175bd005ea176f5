"""Cost, checkpoint and data budgets; Young, Daly and the simulation that checks them."""

from __future__ import annotations

import pytest

from serai.errors import SpecError
from serai.plan import (
    Cluster,
    Layout,
    Model,
    checkpoint_budget,
    daly_interval,
    data_budget,
    expected_goodput,
    predict,
    simulate,
    training,
    young_interval,
)

P = predict(
    Model("gpt", 96, 12288, 96, vocab=51200),
    Cluster.named("ndm-a100-v4", 16),
    Layout(zero=3, micro_batch=8, seq_len=1024, precision="fp16", recompute="full"),
)


def test_cost_follows_from_the_rate() -> None:
    run = training(P, 1e9, goodput=0.5, dollars_per_gpu_hour=2.0)
    assert run.seconds == pytest.approx(1e9 / P.tokens_per_s / 0.5)
    assert run.gpu_hours == pytest.approx(run.seconds * 128 / 3600)
    assert run.dollars == pytest.approx(2.0 * run.gpu_hours)
    assert run.steps == -(-(10**9) // P.tokens_per_step)
    assert run.seconds_interval[0] < run.seconds < run.seconds_interval[1]
    assert run.total_flops == pytest.approx(6 * P.model.params * 1e9, rel=0.05)
    assert training(predict(Model(), Cluster.named("laptop", 1), Layout()), 1e6).dollars is None
    for wrong in ({"tokens": 0}, {"tokens": 1, "goodput": 0.0}):
        with pytest.raises(SpecError) as caught:
            training(P, **wrong)
        assert caught.value.code == "S138"


def test_checkpoint_bytes_and_the_announced_nebula_example() -> None:
    """GPT2-XL: 1.56 B parameters · 14 bytes ≈ 21.8 GB; announced was a 20.6 GB checkpoint."""
    xl = predict(Model("gpt", 48, 1600, 25, vocab=50257), Cluster.named("ndm-a100-v4", 1), Layout(zero=1))
    store = checkpoint_budget(xl, storage_gbps=10)
    assert store.bytes == 14 * xl.model.params
    assert store.bytes == pytest.approx(20.6e9, rel=0.07)
    assert store.durable_s == pytest.approx(store.bytes / 10e9)
    assert store.bytes_per_gpu * 8 == pytest.approx(store.bytes)
    assert store.fits_host
    assert not checkpoint_budget(predict(P.model, AZURE_TINY, P.layout)).fits_host


AZURE_TINY = Cluster.named("ndm-a100-v4", 1, host_memory_gb=500)


def test_data_budget() -> None:
    feed = data_budget(P, bytes_per_sample_token=4, account_gbps=8)
    assert feed.bytes_per_s == pytest.approx(4 * P.tokens_per_s)
    assert feed.nodes_per_account == int(1e9 / (feed.bytes_per_s / 16))


def test_young_and_daly() -> None:
    assert young_interval(2.0, 10_000.0) == pytest.approx(200.0)
    assert daly_interval(2.0, 10_000.0) == pytest.approx(200 * (1 + 0.01 / 3 + 1e-4 / 9) - 2, rel=1e-6)
    assert daly_interval(500.0, 100.0) == 100.0
    with pytest.raises(SpecError):
        young_interval(0, 1)


def test_dalys_interval_is_near_the_optimum_of_the_simulation() -> None:
    mtbf = 50_000 * 3600 / 16_384
    best = daly_interval(60, mtbf)
    common = {"gpus": 16_384, "stall_s": 60.0, "recovery_s": 300.0, "days": 28.0, "replicas": 48}
    at = {factor: simulate(interval_s=best * factor, **common).useful for factor in (0.25, 1.0, 4.0)}
    assert at[1.0] > at[0.25]
    assert at[1.0] > at[4.0]
    assert at[1.0] == pytest.approx(expected_goodput(best, 60, mtbf, 300), abs=0.015)


def test_shares_of_the_simulation_add_up() -> None:
    for gpus in (1024, 16_384):
        life = simulate(gpus=gpus, interval_s=600, stall_s=5, recovery_s=200, lag_s=90, days=21, replicas=32)
        assert life.useful + life.saving + life.lost + life.recovering == pytest.approx(1, abs=1e-9)
        assert life.failures == pytest.approx(21 * 86400 / life.mtbf_s, rel=0.15)
        assert (
            life.interval_80[0] <= life.useful <= life.interval_80[1]
            or life.interval_80[1] - life.interval_80[0] < 0.01
        )
    worse = simulate(gpus=16_384, interval_s=600, stall_s=5, recovery_s=200, lag_s=900, days=21, replicas=32)
    assert worse.lost > life.lost
    repeated = simulate(
        gpus=16_384, interval_s=600, stall_s=5, recovery_s=200, lag_s=90, days=21, replicas=32
    )
    assert repeated == life
