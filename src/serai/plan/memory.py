"""Peak GPU memory of each class of rank, term by term, in bytes.

Per parameter that a rank holds (mixed precision, Adam; after ZeRO, arXiv:1910.02054):

    fp16          weights 2 + gradients 2 + optimizer 12 (fp32 copy, two moments)
    bf16 and below weights 2 + gradients 4 (fp32 accumulation; 6 where the stack keeps both) + optimizer 12;
                   ZeRO-3/FSDP: gradients 2
    fp32          weights 4 + gradients 4 + optimizer 8

ZeRO-1 divides the optimizer by the data-parallel ranks, 2 also the gradients, 3 also the weights.

Activations a layer and token, in bytes (after arXiv:2205.05198 with its 34·h + 5·a·s split by what is stored):
inputs of every product, of the activation, of the norms, dropout masks where the stack has dropout (gpt, bert).
"""

from __future__ import annotations

from dataclasses import dataclass

from serai.plan.cluster import Cluster
from serai.plan.layout import Layout
from serai.plan.model import ARCHITECTURES, Model

__all__ = ["MemoryConstants", "MemoryTerm", "host_bytes", "memory_by_class"]


@dataclass(frozen=True)
class MemoryConstants:
    """context_gb: CUDA context, libraries, NCCL buffers and what the allocator keeps (10^9 bytes);
    fragments: share of the activations and live buffers lost to fragmentation;
    grad_bytes: gradient bytes a parameter for bf16 without ZeRO-3 (4: fp32 sums; 6: bf16 beside them);
    process_gb: what a training process on CPUs holds before it has a model."""

    context_gb: float = 3.0
    fragments: float = 0.05
    grad_bytes: float = 4.0
    process_gb: float = 0.41


@dataclass(frozen=True)
class MemoryTerm:
    name: str
    bytes: float
    formula: str


def _state_bytes(layout: Layout, zero: int, m: MemoryConstants) -> tuple[float, float, float]:
    """(weights, gradients, optimizer) bytes a parameter."""
    if layout.precision == "fp32":
        return 4.0, 4.0, 8.0
    if layout.precision == "fp16" or zero == 3:
        return 2.0, 2.0, 12.0
    return 2.0, m.grad_bytes, 12.0


def activation_bytes(model: Model, layout: Layout, *, moe: bool) -> tuple[float, float, float]:
    """Bytes that one layer keeps for one micro-batch on one rank: (all of it, its input alone, quadratic part)."""
    tp = layout.tp
    tokens = layout.micro_batch * layout.seq_len / layout.cp
    size = 4.0 if layout.precision == "fp32" else 2.0
    split = tp if layout.split_sequence else 1
    h, q, kv = model.hidden, model.q_dim, model.kv_dim
    # stacks with flash attention train without dropout, and keep no masks
    dropout = 1.0 if ARCHITECTURES[model.arch][3] and not layout.flash else 0.0
    mlp = model.width * (model.top_k + model.shared_experts) if moe else model.dense_width
    into = (
        1.0 if layout.family in ("fp8", "fp4") else size
    )  # what enters a product is kept as it was multiplied
    # replicated (or split along the sequence): inputs of two norms, of qkv and of the MLP, two dropout masks
    joined = h * (2 * size + 2 * into + 2 * dropout) / split
    # split over tp: q, k, v, attention output; activation input and output (a gated MLP has two inputs)
    divided = (size * (2 * q + 2 * kv) + (size * (2 if model.gated else 1) + into) * mlp) / tp
    if moe:
        divided += size * h * model.top_k * 2 / split  # routed copies of the tokens, in and out
    if layout.flash:
        quadratic = 4.0 * model.heads / tp * tokens  # softmax statistics
    else:
        quadratic = model.heads / tp * tokens * layout.seq_len * (2 * size + dropout)
    entry = size * h * tokens / split
    return tokens * (joined + divided) + quadratic, entry, quadratic


def memory_by_class(
    model: Model, cluster: Cluster, layout: Layout, m: MemoryConstants, zero: int
) -> dict[str, list[MemoryTerm]]:
    """Terms by class of rank: ``all`` without a pipeline, else ``first``, ``middle`` (pp > 2) and ``last`` stage."""
    names = ["all"] if layout.pp == 1 else ["first", "middle", "last"] if layout.pp > 2 else ["first", "last"]
    return {name: _class(model, cluster, layout, m, zero, name) for name in names}


def _class(
    model: Model, cluster: Cluster, layout: Layout, m: MemoryConstants, zero: int, name: str
) -> list[MemoryTerm]:
    tp, pp, ga, vpp = layout.tp, layout.pp, layout.grad_accum, layout.virtual_pp
    ranks = layout.data_parallel(cluster.gpus) * layout.cp
    tokens = layout.micro_batch * layout.seq_len / layout.cp
    size = 4.0 if layout.precision == "fp32" else 2.0
    first, last = name in ("all", "first"), name in ("all", "last")
    # An uneven split gives the ends fewer layers (the embedding stands for one).
    layers = (
        -(-model.layers // pp) if model.layers % pp == 0 or name == "middle" else max(1, model.layers // pp)
    )
    layers = model.layers if pp == 1 else layers

    # -- parameters of this stage -------------------------------------------------------------------------
    body = model.other_params / model.layers * layers
    vocabulary = float(model.embedding_params)
    ends = 0.0
    if pp == 1:
        ends = vocabulary * (1 if model.tied or model.arch == "vit" else 2)
        body += model.params - model.other_params - model.expert_params - ends  # positions, final norm
        body = max(body, 0.0)
    elif first or last:
        ends = vocabulary
    dense = (body + ends) / tp
    experts = model.expert_params * layers / model.layers / (layout.ep if layout.ep > 1 else 1)
    experts /= tp if layout.ep == 1 else 1
    expert_ranks = max(1, ranks * tp // layout.ep) if layout.ep > 1 else ranks
    weight, gradient, state = _state_bytes(layout, zero, m)

    def held(bytes_each: float, split: bool) -> float:
        return bytes_each * (dense / (ranks if split else 1) + experts / (expert_ranks if split else 1))

    off = layout.offload_ratio if layout.offload else 0.0
    off_weights = off if layout.offload == "all" else 0.0
    weights = held(weight, zero >= 3) * (1 - off_weights)
    gradients = held(gradient, zero >= 2) * (1 - off)
    optimizer = held(state, zero >= 1) * (1 - off)
    terms = [
        MemoryTerm(
            "weights", weights, f"{weight:g} bytes · stage parameters / tp" + (" / dp" if zero >= 3 else "")
        ),
        MemoryTerm(
            "gradients",
            gradients,
            f"{gradient:g} bytes · stage parameters / tp" + (" / dp" if zero >= 2 else ""),
        ),
        MemoryTerm(
            "optimizer",
            optimizer,
            f"{state:g} bytes · stage parameters / tp" + (" / dp" if zero >= 1 else ""),
        ),
    ]

    # -- live buffers ----------------------------------------------------------------------------------------
    layer = (model.other_params / model.layers) / tp
    if model.moe_layers:
        layer += model.expert_params / model.moe_layers / (layout.ep if layout.ep > 1 else tp)
    live = 0.0
    if zero == 3 and ranks > 1:
        # DeepSpeed and FSDP gather at most a block, and of a huge block at most one matrix at a time
        unit = min(layer, max(1e9, model.hidden * model.width / tp))
        live = (max(1.5 * unit, ends / tp) + unit) * size
        whole_model = (dense + experts) * 2 * size
        # a heap keeps what a block frees (measured on FSDP2); a caching allocator gives it to the next block
        live = whole_model if cluster.gpu.generation == "cpu" else min(live, whole_model)
    elif zero >= 1 and ranks > 1:
        live = min((dense + experts) * 2.0, 5e8 * 2.0)  # bucket of the gradient reduction
    terms.append(
        MemoryTerm(
            "live buffers",
            live,
            "ZeRO-3: 1 block (at most 10⁹ or one matrix) gathered, ½ prefetched, 1 of gradients, 2 bytes each; else a bucket",
        )
    )

    # -- activations ------------------------------------------------------------------------------------------
    dense_all, entry, quadratic = activation_bytes(model, layout, moe=False)
    whole = dense_all
    if model.moe_layers:
        moe_all, _, _ = activation_bytes(model, layout, moe=True)
        whole = (moe_all * model.moe_layers + dense_all * (model.layers - model.moe_layers)) / model.layers
    stage = 0 if first else pp - 1 if last else 1
    flights: float = min(ga, pp - stage) if pp > 1 else 1
    if vpp > 1 and pp > 1:
        flights = min(ga, (2 * (pp - stage - 1) + (vpp - 1) * pp + 1) / vpp)  # chunks of 1/vpp of the stage
    if layout.recompute == "full":
        kept = entry * layers * flights
        working = whole  # one layer lives again
        kept *= 1 - off_weights  # offload "all" sends the kept inputs to the host too
    elif layout.recompute == "selective":
        kept = (whole - (0.0 if layout.flash else quadratic)) * layers * flights
        working = 0.0 if layout.flash else quadratic
    else:
        kept = whole * layers * flights
        working = 0.0
    terms.append(
        MemoryTerm(
            "activations",
            kept,
            f"{layers} layers · {flights:g} micro-batches in flight · bytes by recompute policy",
        )
    )
    terms.append(MemoryTerm("working set", working, "what recomputation brings back for one layer"))
    if last:
        rows = layout.micro_batch if model.arch == "vit" else tokens
        terms.append(
            MemoryTerm(
                "logits",
                rows * model.vocab / tp * (size + 4),
                "T · V/tp · (logits, and an fp32 softmax that its gradient overwrites)",
            )
        )
    if first and pp > 1:
        terms.append(
            MemoryTerm("stage input", entry * flights, "embedded tokens of the micro-batches in flight")
        )
    if layout.precision != "fp32" and not layout.offload:
        casts = held(4.0, zero >= 1)
        beside = (
            max(0.0, casts - sum(term.bytes for term in terms[3:])) if layout.precision == "fp16" else 0.0
        )
        terms.append(
            MemoryTerm(
                "fp32 gradients",
                beside,
                "4 bytes · what the optimizer holds, at the step, beyond the freed activations",
            )
        )
    context = m.context_gb if cluster.gpu.generation != "cpu" else m.process_gb
    moving = sum(term.bytes for term in terms[3:])
    terms.append(
        MemoryTerm("fragmentation", m.fragments * moving, "fragments · (live buffers + activations + logits)")
    )
    terms.append(
        MemoryTerm(
            "context", context * 1e9, "CUDA context, libraries, NCCL buffers (CPU: interpreter and libraries)"
        )
    )
    return terms


def host_bytes(model: Model, cluster: Cluster, layout: Layout, zero: int) -> float:
    """Bytes of host memory that offloading takes on one node."""
    if not layout.offload:
        return 0.0
    ranks = layout.data_parallel(cluster.gpus) * layout.cp
    held = model.params / (layout.tp * layout.pp) / (ranks if zero >= 1 else 1)
    each = 14.0 + (2.0 if layout.offload == "all" else 0.0)
    kept = 0.0
    if layout.offload == "all" and layout.recompute == "full":
        _, entry, _ = activation_bytes(model, layout, moe=False)
        kept = entry * model.layers / layout.pp * (min(layout.grad_accum, layout.pp))
    return layout.offload_ratio * (each * held + kept) * cluster.gpus_per_node
