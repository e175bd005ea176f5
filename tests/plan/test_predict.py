"""``predict``: names and positions of the interface, sums of terms, conventions, what never raises."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from serai.errors import SpecError
from serai.plan import Cluster, Layout, Model, predict
from serai.plan.machines import MACHINES

GPT_175B = Model("gpt", 96, 12288, 96, 96, 49152, 51200)
AZURE = Cluster.named("ndm-a100-v4", 16)
HEADLINE = Layout(zero=3, micro_batch=8, seq_len=1024, precision="fp16", recompute="full")


def test_terms_add_up_to_the_totals() -> None:
    layouts = [
        HEADLINE,
        Layout(zero=1, tp=8, pp=4, virtual_pp=3, grad_accum=16, precision="bf16", recompute="selective"),
        Layout(zero=2, micro_batch=2, offload="optimizer", offload_ratio=0.5),
        Layout(zero=3, cp=4, tp=2, seq_len=32768, offload="all", recompute="full"),
    ]
    for layout in layouts:
        p = predict(GPT_175B, AZURE, layout)
        assert sum(t.value for t in p.terms if t.kind == "time") == pytest.approx(p.step_time_s, rel=1e-9)
        assert sum(t.value for t in p.terms if t.kind == "memory") == pytest.approx(p.memory_gb, rel=1e-9)
        assert max(p.memory_by_class.values()) == p.memory_gb
        assert all(t.formula and t.value >= 0 for t in p.terms)
        assert {t.unit for t in p.terms} == {"s", "GB"}


def test_conventions_of_tflops() -> None:
    """With full recomputation MFU is three quarters of HFU, but for the vocabulary; both follow from tokens/s."""
    p = predict(GPT_175B, AZURE, HEADLINE)
    assert p.mfu == pytest.approx(0.75 * p.hfu, rel=0.01)
    assert p.hfu * 312 == pytest.approx(p.tflops("hardware"), rel=1e-9)
    assert p.tflops_per_gpu == pytest.approx(p.mfu * 312)
    assert p.tflops("causal") < p.tflops("model") < p.tflops("hardware")
    # 96·B·s·L·h²·(1 + s/6h + V/16Lh), the formula printed with the announced figures
    s, layers, h, vocab = 1024, 96, 12288, 51200
    flops = 96 * 8 * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert p.tflops("hardware") == pytest.approx(flops / p.step_time_s / 1e12, rel=0.002)
    assert p.tokens_per_s == pytest.approx(128 * 8 * 1024 / p.step_time_s)
    assert "attention" in p.flops_formula


def test_parameters_of_known_models() -> None:
    assert GPT_175B.params == pytest.approx(174.6e9, rel=0.002)
    assert Model("llama", 32, 4096, 32, 8, 14336, 128256).params == pytest.approx(8.03e9, rel=0.002)
    assert Model("llama", 80, 8192, 64, 8, 28672, 128256).params == pytest.approx(70.55e9, rel=0.002)
    assert Model("moe", 32, 4096, 32, 8, 14336, 32000, experts=8, top_k=2).params == pytest.approx(
        46.7e9, rel=0.002
    )
    assert Model("moe", 32, 4096, 32, 8, 14336, 32000, experts=8, top_k=2).active_params == pytest.approx(
        12.9e9, rel=0.01
    )
    assert Model("bert", 24, 1024, 16, vocab=30522, positions=512).params == pytest.approx(335e6, rel=0.01)
    assert Model("vit", 12, 768, 12, vocab=1000).params == pytest.approx(86.6e6, rel=0.01)


def test_the_announced_points_are_within_eight_percent() -> None:
    """530B, 1T and 2T were never fitted on; published TFLOPs count the recomputed forward."""
    for layers, hidden, heads, nodes, offload, published in (
        (105, 20480, 128, 64, None, 170.42),
        (105, 20480, 128, 128, None, 171.37),
        (128, 25600, 160, 128, "optimizer", 165.36),
        (160, 32768, 128, 128, "all", 157.0),
    ):
        p = predict(
            Model("gpt", layers, hidden, heads, heads, 4 * hidden, 51200),
            Cluster.named("ndm-a100-v4", nodes),
            HEADLINE.replace(offload=offload),
        )
        assert p.tflops("hardware") == pytest.approx(published, rel=0.08)
        low, high = p.step_time_interval_s
        measured = p.step_time_s * p.tflops("hardware") / published
        assert low < measured < high


def test_what_does_not_fit_still_has_numbers() -> None:
    p = predict(GPT_175B, Cluster.named("v100-16gb", 1), Layout(zero=0, micro_batch=8))
    assert not p.fits
    assert p.step_time_s > 0
    assert p.memory_gb > 16
    assert any("does not fit" in warning for warning in p.warnings)


def test_host_memory_can_be_what_does_not_fit() -> None:
    laptop = Cluster.named("a100-80gb", 1, host_memory_gb=64)
    p = predict(Model("gpt", 40, 5120, 40), laptop, Layout(zero=3, recompute="full", offload="optimizer"))
    assert p.memory_gb < 80
    assert not p.fits
    assert any("host memory" in warning for warning in p.warnings)


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"tp": 3}, "S133"), ({"ep": 7}, "S133"), ({"tp": 0}, "S132"), ({"precision": "int4"}, "S132"), ({"recompute": "some"}, "S132"), ({"offload_ratio": 2.0}, "S132")],
)  # fmt: skip
def test_nonsense_is_an_error(changes: dict[str, object], code: str) -> None:
    with pytest.raises(SpecError) as caught:
        predict(GPT_175B, AZURE, HEADLINE.replace(**changes))
    assert caught.value.code == code
    assert caught.value.expected


def test_an_unknown_machine_names_the_nearest() -> None:
    with pytest.raises(SpecError, match="h200-141gb") as caught:
        Cluster.named("h200-140gb", 1)
    assert caught.value.code == "S130"
    with pytest.raises(SpecError) as caught:
        Cluster.named("h100-80gb", 1, inter_node_gbs=3200)
    assert caught.value.code == "S131"
    with pytest.raises(SpecError):
        Cluster.named("h100-80gb", 1, inter_node_gbps=0.0)
    with pytest.raises(SpecError):
        Cluster.named("h100-80gb", 0)


@pytest.mark.parametrize(
    "value", [3.2e12, "3200", "3200 Gb/s", -1, 0, float("nan"), float("inf"), True, None]
)
@pytest.mark.parametrize("field", ["inter_node_gbps", "hbm_gbps", "memory_gb", "pcie_gbps"])
def test_units_are_checked(field: str, value: object) -> None:
    with pytest.raises(SpecError, match=field) as caught:
        Cluster.named("h100-80gb", 2, **{field: value})
    assert caught.value.code == "S131"
    assert "10^9" in (caught.value.expected or "")


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_every_machine_predicts_every_precision(name: str) -> None:
    cluster = Cluster.named(name, 2)
    for precision in ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"):
        p = predict(Model("llama", 8, 1024, 16, 4, 2816, 32000), cluster, Layout(precision=precision))
        assert 0 < p.step_time_interval_s[0] < p.step_time_s < p.step_time_interval_s[1]
        assert 0 < p.mfu < 1


def test_zero_none_takes_the_least_that_fits() -> None:
    small = predict(Model("gpt", 12, 768, 12), AZURE, Layout(precision="fp16"))
    assert small.zero in (0, 1)
    assert small.fits
    big = predict(GPT_175B, AZURE, HEADLINE.replace(zero=None))
    assert big.zero == 3
    assert big.fits


def test_outside_the_hull_the_interval_widens() -> None:
    def width(nodes: int, gbps: float) -> float:
        p = predict(GPT_175B, Cluster.named("ndm-a100-v4", nodes, inter_node_gbps=gbps), HEADLINE)
        return p.step_time_interval_s[1] / p.step_time_interval_s[0]

    assert width(2048, 1600) > width(64, 1600)
    assert width(64, 25) > width(64, 1600)
    far = predict(GPT_175B, Cluster.named("ndm-a100-v4", 2048), HEADLINE)
    assert any("outside" in warning for warning in far.warnings)


def test_a_prediction_takes_less_than_a_second_and_no_torch() -> None:
    started = time.monotonic()
    predict(GPT_175B, AZURE, HEADLINE)
    assert time.monotonic() - started < 1
    program = (
        "import sys; import serai.plan; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
