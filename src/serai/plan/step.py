"""The time of one step, term by term. Every term is additive; their sum is the step."""

from __future__ import annotations

from dataclasses import dataclass

from serai.plan import network
from serai.plan.cluster import Cluster
from serai.plan.compute import LayerTime, head_time, layer_time
from serai.plan.constants import Constants
from serai.plan.layout import Layout
from serai.plan.model import Model

__all__ = ["StepTerm", "smooth_max", "step_terms"]


@dataclass(frozen=True)
class StepTerm:
    name: str
    seconds: float
    formula: str


def smooth_max(a: float, b: float, p: float) -> float:
    """(a^p + b^p)^(1/p): a + b at p = 1, max at p = ∞. Monotone in both; never below either."""
    if a <= 0 or b <= 0:
        return max(a, b)
    big, small = (a, b) if a >= b else (b, a)
    return big * float((1.0 + (small / big) ** p) ** (1.0 / p))


def _stages(layers: int, pp: int) -> tuple[int, int]:
    """(layers of the fullest stage, of the last one) for the most even split."""
    most = -(-layers // pp)
    return most, layers - most * (pp - 1) if layers % pp == 0 else layers // pp


def step_terms(model: Model, cluster: Cluster, layout: Layout, k: Constants, zero: int) -> list[StepTerm]:
    """All terms of one optimizer step in seconds (``zero`` is the stage really used)."""
    dp = layout.data_parallel(cluster.gpus)
    tp, pp, cp, ep, ga, vpp = layout.tp, layout.pp, layout.cp, layout.ep, layout.grad_accum, layout.virtual_pp
    tokens = layout.micro_batch * layout.seq_len / cp
    size = 4 if layout.precision == "fp32" else 2

    dense = layer_time(model, cluster, layout, k, moe=False)
    kinds: list[tuple[LayerTime, float]] = [(dense, float(model.layers - model.moe_layers))]
    if model.moe_layers:
        kinds.append((layer_time(model, cluster, layout, k, moe=True), float(model.moe_layers)))
    head, embedding = head_time(model, cluster, layout, k)

    # -- traffic of one layer and one micro-batch --------------------------------------------------------
    passes = 2 + (layout.recompute == "full")  # forward, backward, and the second forward
    tp_group = network.group(cluster, k, tp, 1)
    tp_layer = 2 * passes * network.all_reduce(tp_group, tokens * model.hidden * size) * k.tp_exposed
    cp_layer = 0.0
    if cp > 1:
        ring = network.group(cluster, k, cp, tp)
        attention, backward = kinds[-1][0].attention, kinds[-1][0].attention_backward
        hop = network.all_gather(ring, 2 * tokens * cp * model.kv_dim / tp * size)
        forward = smooth_max(attention, hop, 2.0) - attention
        back = smooth_max(backward, 2 * hop, 2.0) - backward
        cp_layer = forward * (passes - 1) + back
    ep_layer = 0.0
    if ep > 1 and model.moe_layers:
        spread = network.group(cluster, k, ep, 1)
        sent = tokens / tp * model.top_k * model.hidden * (1 if layout.family in ("fp8", "fp4") else size)
        ep_layer = 2 * passes * network.all_to_all(spread, sent) * k.moe_exposed

    # -- one micro-batch, all layers of the model ---------------------------------------------------------
    linear = sum(3 * kind.linear * n for kind, n in kinds)
    attention_s = sum((kind.attention + kind.attention_backward) * n for kind, n in kinds)
    elementwise = sum(3 * kind.elementwise * n for kind, n in kinds)
    again = sum(kind.recompute(layout.recompute, flash=layout.flash) * n for kind, n in kinds)
    busy = linear + attention_s + elementwise + again
    host_passes = 2.2 + (1.0 if layout.recompute == "full" else 0.2 * (layout.recompute == "selective"))
    host = sum(kind.host * n for kind, n in kinds) * host_passes
    tp_s, cp_s, ep_s = tp_layer * model.layers, cp_layer * model.layers, ep_layer * model.moe_layers
    waits = smooth_max(busy + cp_s, host, 3.0) - busy - cp_s  # the GPU waits for the host to issue kernels
    whole = busy + cp_s + waits + tp_s + ep_s

    # -- the pipeline -------------------------------------------------------------------------------------
    most, last = _stages(model.layers, pp)
    per_layer = whole / model.layers
    ends = head + embedding
    if pp > 1:
        slowest = max(
            most * per_layer,
            last * per_layer + head,
            (most if last == most else most - 1) * per_layer + embedding,
        )
    else:
        slowest = whole + ends
    mean = (whole + ends) / pp
    lag = max(0.0, slowest - mean)
    bubble = (pp - 1) / vpp * mean
    sends = 0.0
    if pp > 1:
        outside = cluster.gpus > cluster.domain
        message = tokens * model.hidden * size / tp
        one = network.send(cluster, k, message, inside=not outside)
        sends = 2 * vpp * one * k.pp_exposed * (ga + pp - 1)

    # -- gradients, parameters, optimizer -----------------------------------------------------------------
    ranks = dp * cp
    local = (model.params - model.expert_params) / (tp * pp)
    expert_local = model.expert_params / (pp * (ep if ep > 1 else 1) * (tp if ep == 1 else 1))
    data = network.group(cluster, k, ranks, tp)
    expert_ranks = max(1, ranks * tp // ep) if ep > 1 else ranks
    expert_data = network.group(cluster, k, expert_ranks, ep if ep > 1 else tp)
    grad_size = 4 if zero < 3 and layout.precision in ("fp32", "bf16", "fp8", "mxfp8", "nvfp4") else size
    compute = ga * max(slowest, mean)
    shard = 0.0
    gradients = 0.0
    raw = 0.0
    if ranks > 1 and zero >= 2:
        gathers = 2 if zero == 3 else 1
        for amount, who in ((local, data), (expert_local, expert_data)):
            if amount:
                raw += (gathers + 1) * network.all_gather(who, amount * size) * (ga if zero == 3 else 1)
                if zero == 2:
                    raw += (ga - 1) * network.all_gather(who, amount * size)
        raw += (gathers + 1) * data.alpha * model.layers / pp * (ga if zero == 3 else 1)
        shard = smooth_max(compute, raw, k.overlap) - compute
    elif ranks > 1:
        for amount, who in ((local, data), (expert_local, expert_data)):
            if amount:
                reduce = network.all_gather(who, amount * grad_size)
                raw += reduce + (network.all_gather(who, amount * size) if zero == 1 else reduce)
        gradients = raw * k.dp_exposed
    if pp > 1 and model.tied and tp * pp > 1:
        both = network.group(cluster, k, 2, tp * cp * dp)
        gradients += network.all_reduce(both, model.embedding_params / tp * size)

    held = local + expert_local
    if zero >= 1:
        held = local / ranks + expert_local / expert_ranks
    on_host = layout.offload_ratio if layout.offload else 0.0
    optimizer = (1 - on_host) * held * 34 / (cluster.hbm_gbps * 1e9)
    terms = [
        StepTerm("matrix products", ga * linear / pp, "Σ 3·2·M·N·K/rate·(1 + d·(1/M+1/N+1/K)) · layers/pp · grad_accum"),
        StepTerm("attention", ga * attention_s / pp, "flash: ½·4·T·s·q/(rate·attention)·3.5 (causal); math: products + softmax traffic"),
        StepTerm("element-wise", ga * elementwise / pp, "3 · passes · T·(10h + 2(q+2kv) + 2ffn)·bytes / HBM"),
        StepTerm("recomputation", ga * again / pp, "full: one more forward; selective: the attention core"),
        StepTerm("vocabulary and embedding", ga * ends / pp, "3·2·T·h·V/tp / rate + loss traffic / HBM"),
        StepTerm("waiting for the host", ga * waits / pp, "(gpu³ + host³)^⅓ − gpu, host = launch · layers · passes"),
        StepTerm("tensor parallel traffic", ga * tp_s / pp, "2 all-reduces a pass of T·h · tp_exposed"),
        StepTerm("context parallel traffic", ga * cp_s / pp, "ring of K and V beyond the attention that hides it"),
        StepTerm("expert all-to-all", ga * ep_s / pp, "2 a pass of T·top_k·h · moe_exposed"),
        StepTerm("slowest stage", ga * lag, "grad_accum · (slowest stage − mean stage)"),
        StepTerm("pipeline bubble", bubble, "(pp − 1)/virtual_pp · mean stage"),
        StepTerm("pipeline sends", sends, "2·virtual_pp · (α + T·h/tp / rate) · pp_exposed · (grad_accum + pp − 1)"),
        StepTerm("sharded weights and gradients", shard, "smooth max(compute, (2 gathers + 1 scatter of 2P bytes)·grad_accum) − compute"),
        StepTerm("gradient reduction", gradients, "reduce-scatter + all-gather of the gradients · dp_exposed"),
        StepTerm("optimizer", optimizer, "34 bytes a held parameter / HBM"),
        StepTerm("fixed", k.step_ms * 1e-3, "host time of a step"),
    ]  # fmt: skip
    if layout.offload:
        # Fetches hide behind what is counted beside them, so that less of it can never make a step longer.
        hidden_by = compute + shard + gradients
        terms += _offload(model, cluster, layout, held, local, ga, on_host, hidden_by)
    return terms


def _offload(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    held: float,
    local: float,
    ga: int,
    share: float,
    hidden_by: float,
) -> list[StepTerm]:
    """CPU Adam reads 16 and writes 14 bytes a parameter in host DRAM; gradients go down and weights up once.

    With offload ``all`` the weights are also fetched from the host for every gather, beside the computation.
    """
    pcie = cluster.pcie_gbps * 1e9 * 0.7  # pinned copies in both directions at once
    adam = share * held * cluster.gpus_per_node * 30 / (cluster.host_dram_gbps * 1e9 * 0.6)
    copies = share * held * 4 / pcie
    terms = [
        StepTerm("CPU Adam", adam, "ratio · held · gpus_per_node · 30 bytes / host DRAM"),
        StepTerm("optimizer copies", copies, "ratio · held · 4 bytes / PCIe"),
    ]
    if layout.offload == "all":
        fetch = share * held * 2 * 2 * ga / pcie
        exposed = smooth_max(hidden_by, fetch, 3.0) - hidden_by
        terms.append(
            StepTerm(
                "weight fetches", exposed, "2 · ratio · held · 2 bytes · grad_accum / PCIe beyond compute"
            )
        )
        if layout.recompute == "full":
            size = 4 if layout.precision == "fp32" else 2
            entry = layout.micro_batch * layout.seq_len / layout.cp * model.hidden * size
            copied = 2 * share * entry * model.layers / layout.pp * ga / pcie
            formula = "2 · ratio · T·h·bytes · layers/pp · grad_accum / PCIe, not hidden"
            terms.append(StepTerm("activation copies", copied, formula))
    return terms
