"""What one layer costs one rank for one micro-batch: matrix products, attention, element-wise work, host.

Seconds. ``tokens`` is micro_batch · seq_len / cp. A product of M × N × K takes

    2·M·N·K / rate · (1 + d · (1/M + 1/N + 1/K)),   d = balance · peak · bytes / (2 · HBM)

which is its arithmetic plus the traffic of its three matrices (intensity = 1 / (1/M + 1/N + 1/K)). The two
products of the backward pass permute M, N, K, so backward = 2 · forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from serai.plan.cluster import Cluster
from serai.plan.constants import Constants
from serai.plan.layout import Layout
from serai.plan.model import Model

__all__ = ["LayerTime", "head_time", "layer_time"]


#: Single-thread speed of the hosts that came with a generation, relative to Ampere's EPYC 7002: seconds a launch.
_HOST = {
    "volta": 1.1,
    "turing": 1.1,
    "ampere": 1.0,
    "ada": 0.7,
    "hopper": 0.6,
    "blackwell": 0.5,
    "cdna3": 0.6,
    "cdna4": 0.5,
}


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and one micro-batch on one rank, forward unless said otherwise."""

    linear: float
    attention: float
    attention_backward: float
    elementwise: float
    host: float

    @property
    def forward(self) -> float:
        return self.linear + self.attention + self.elementwise

    @property
    def backward(self) -> float:
        return 2 * self.linear + self.attention_backward + 2 * self.elementwise

    def recompute(self, policy: str, *, flash: bool) -> float:
        """What the backward pass runs again. Selective is the attention core (and, with flash, which stores
        nothing quadratic, some cheap element-wise outputs too)."""
        if policy == "full":
            return self.forward
        if policy == "selective":
            return self.attention + (0.3 * self.elementwise if flash else 0.0)
        return 0.0


def _rate(cluster: Cluster, family: str, gemm: float, gemm_low: float, balance: float) -> tuple[float, float]:
    """(FLOP/s of a large product, half-saturation size d) for one precision family."""
    gpu = cluster.gpu
    peak = gpu.peak(family)
    if family in ("fp8", "fp4") and family in gpu.tflops:
        share, width = gpu.ceiling_low * gemm * gemm_low, 1.5 if family == "fp8" else 1.25
    else:
        share, width = gpu.ceiling * gemm, 4.0 if family == "fp32" else 2.0
    return peak * share, balance * peak * width / (2 * cluster.hbm_gbps * 1e9)


def layer_time(model: Model, cluster: Cluster, layout: Layout, k: Constants, *, moe: bool) -> LayerTime:
    """One transformer layer, tensor parallel over ``layout.tp``; ``moe`` says whether its MLP is routed."""
    tp, cp = layout.tp, layout.cp
    tokens = layout.micro_batch * layout.seq_len / cp
    h, q, kv = model.hidden, model.q_dim, model.kv_dim
    hbm = cluster.hbm_gbps * 1e9
    rate, d = _rate(cluster, layout.family, k.gemm, k.gemm_low, k.balance)
    half, d_half = _rate(
        cluster, "fp32" if layout.family == "fp32" else "half", k.gemm, k.gemm_low, k.balance
    )

    def product(m: float, n: float, inner: float) -> float:
        seconds = 2 * m * n * inner / rate * (1 + d * (1 / m + 1 / n + 1 / inner))
        if n % 64 or inner % 64:
            seconds /= k.misaligned
        return seconds

    linear = product(tokens, (q + 2 * kv) / tp, h) + product(tokens, h, q / tp)
    gates = 2 if model.gated else 1
    if moe:
        # every rank receives as many routed tokens as it sends; an expert sees its share of ep ranks' tokens
        local = max(1.0, model.experts / layout.ep)
        rows = max(1.0, tokens * model.top_k / local * k.imbalance)
        etp = tp if layout.ep * tp <= cluster.gpus and layout.ep == 1 else 1
        rows /= 1 if etp == tp else tp
        width = model.width / etp
        linear += local * (gates * product(rows, width, h) + product(rows, h, width))
        if model.shared_experts:
            shared = model.shared_experts * model.width / tp
            linear += gates * product(tokens, shared, h) + product(tokens, h, shared)
        inner = model.width * (model.top_k + model.shared_experts)
    else:
        inner = model.dense_width
        linear += gates * product(tokens, inner / tp, h) + product(tokens, h, inner / tp)

    # element-wise: two norms and two residual/dropout joins over h, the activation over the MLP width
    joins = 10 * h / (tp if layout.split_sequence else 1)
    width_traffic = (2 * (q + 2 * kv) + (3 if model.gated else 2) * inner) / tp
    size = 4 if layout.precision == "fp32" else 2
    traffic = tokens * size * (joins + width_traffic)
    if layout.family in ("fp8", "fp4"):
        traffic *= 1.25  # amax and casts of what enters a product
    if moe:
        traffic += tokens * 2 * size * h * model.top_k / tp  # permute and un-permute
    elementwise = k.passes * traffic / hbm

    seq = layout.seq_len
    q = model.core_dim
    flops = 4.0 * tokens * seq * q / tp
    if layout.flash:
        share = 0.5 if model.causal else 1.0
        attention = share * flops / (half * k.attention)
        backward = 2.5 * attention
    else:
        dim = max(1.0, q / model.heads)
        bad = k.misaligned**3 if dim % 8 else 1.0  # no tensor cores
        core = flops / half * (1 + d_half * (1 / dim + 2 / seq)) / bad
        scores = layout.micro_batch * model.heads / tp * seq * seq / cp
        softmax = k.passes * scores * size * 3.5 / hbm
        attention, backward = core + softmax, 2 * core + softmax
    issue = 1.0 + (0.35 if tp > 1 else 0.0) + (1.0 if moe else 0.0)
    host = k.launch_us * 1e-6 * issue * _HOST.get(cluster.gpu.generation, 1.0)
    return LayerTime(linear, attention, backward, elementwise, host)


def head_time(model: Model, cluster: Cluster, layout: Layout, k: Constants) -> tuple[float, float]:
    """(seconds of the vocabulary projection and loss, of the embedding), forward and backward together."""
    tokens = layout.micro_batch * layout.seq_len / layout.cp
    hbm = cluster.hbm_gbps * 1e9
    family = "fp32" if layout.family == "fp32" else "half"
    rate, d = _rate(cluster, family, k.gemm, k.gemm_low, k.balance)
    rows = layout.micro_batch if model.arch == "vit" else tokens
    columns = model.vocab / layout.tp
    seconds = (
        3 * 2 * rows * columns * model.hidden / rate * (1 + d * (1 / rows + 1 / columns + 1 / model.hidden))
    )
    loss = k.passes * rows * columns * 26 / hbm  # bf16 logits out and in, fp32 softmax and its gradient
    embedding = k.passes * tokens * model.hidden * 16 / hbm
    return seconds + loss, embedding
