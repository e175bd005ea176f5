"""Properties that hold over the whole space of models, clusters and layouts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serai.plan import Cluster, Layout, Model, predict
from serai.plan.step import smooth_max

ARCHES = st.sampled_from(["gpt", "llama", "moe", "bert"])
NAMES = st.sampled_from(
    ["ndm-a100-v4", "v100-32gb", "h100-80gb", "b200-180gb", "gb200", "rtx-4090", "mi300x"]
)


@st.composite
def models(draw: st.DrawFn) -> Model:
    arch = draw(ARCHES)
    heads = draw(st.sampled_from([8, 16, 32, 64]))
    experts = draw(st.sampled_from([8, 64])) if arch == "moe" else 0
    return Model(
        arch,
        draw(st.integers(1, 96)),
        heads * draw(st.sampled_from([64, 128])),
        heads,
        draw(st.sampled_from([heads, heads // 4])),
        vocab=draw(st.sampled_from([32000, 50257, 128256])),
        experts=experts,
        top_k=2 if experts else 0,
    )


@st.composite
def layouts(draw: st.DrawFn, **fixed: object) -> Layout:
    values: dict[str, object] = {
        "zero": draw(st.sampled_from([0, 1, 2, 3])),
        "tp": draw(st.sampled_from([1, 2, 8])),
        "pp": draw(st.sampled_from([1, 2, 4])),
        "cp": draw(st.sampled_from([1, 2])),
        "micro_batch": draw(st.integers(1, 16)),
        "grad_accum": draw(st.integers(1, 16)),
        "seq_len": draw(st.sampled_from([512, 2048, 8192])),
        "precision": draw(st.sampled_from(["fp16", "bf16", "fp8"])),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "offload": draw(st.sampled_from([None, "optimizer", "all"])),
        "offload_ratio": draw(st.sampled_from([0.3, 1.0])),
    }
    return Layout(**{**values, **fixed})  # type: ignore[arg-type]


@settings(deadline=None, max_examples=150)
@given(models(), NAMES, layouts(zero=3), st.integers(1, 5))
def test_more_gpus_never_need_more_memory_with_zero_3(
    model: Model, name: str, layout: Layout, doublings: int
) -> None:
    few = predict(model, Cluster.named(name, 8), layout)
    many = predict(model, Cluster.named(name, 8 << doublings), layout)
    assert many.memory_gb <= few.memory_gb * (1 + 1e-9)


@settings(deadline=None, max_examples=150)
@given(models(), NAMES, layouts(), st.floats(1.01, 16), st.sampled_from(["inter_node_gbps", "intra_node_gbps", "hbm_gbps", "pcie_gbps", "host_dram_gbps"]))  # fmt: skip
def test_time_never_rises_with_a_faster_link(
    model: Model, name: str, layout: Layout, factor: float, field: str
) -> None:
    slow = Cluster.named(name, 8)
    fast = slow.replace(**{field: getattr(slow, field) * factor})
    assert predict(model, fast, layout).step_time_s <= predict(model, slow, layout).step_time_s * (1 + 1e-9)


@settings(deadline=None, max_examples=150)
@given(models(), NAMES, layouts())
def test_sums_and_order(model: Model, name: str, layout: Layout) -> None:
    p = predict(model, Cluster.named(name, 8), layout)
    assert abs(sum(p.time_terms().values()) - p.step_time_s) <= 1e-9 * p.step_time_s
    assert abs(sum(p.memory_terms().values()) - p.memory_gb) <= 1e-9 * p.memory_gb
    assert all(term.value >= 0 for term in p.terms)
    assert 0 < p.step_time_interval_s[0] < p.step_time_s < p.step_time_interval_s[1]
    assert 0 < p.mfu <= p.hfu < 1


@settings(deadline=None, max_examples=60)
@given(models(), NAMES, layouts())
def test_zero_stages_only_save_memory(model: Model, name: str, layout: Layout) -> None:
    """Each stage divides more of the state; what ZeRO-3 gathers may cost it back only for tiny states.

    Of one pipeline stage: the terms are those of the worst class of ranks, which may be another at another
    ZeRO stage.
    """
    cluster = Cluster.named(name, 8)
    flat = layout.replace(pp=1, virtual_pp=1)
    stages = [predict(model, cluster, flat.replace(zero=stage)).memory_terms() for stage in (0, 1, 2, 3)]
    state = [terms["weights"] + terms["gradients"] + terms["optimizer"] for terms in stages]
    assert state == sorted(state, reverse=True)


@settings(deadline=None)
@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9), st.floats(1, 8))
def test_smooth_max_lies_between_max_and_sum(a: float, b: float, p: float) -> None:
    assert max(a, b) <= smooth_max(a, b, p) * (1 + 1e-12)
    assert smooth_max(a, b, p) <= (a + b) * (1 + 1e-12)
