"""A model's shape, its parameters and its FLOPs. Nothing here knows of machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from serai.errors import SpecError

__all__ = ["ARCHITECTURES", "Model"]

#: arch → (gated MLP, causal attention, tied embeddings, biases, learned positions)
ARCHITECTURES: dict[str, tuple[bool, bool, bool, bool, bool]] = {
    "gpt": (False, True, True, True, True),
    "llama": (True, True, False, False, False),
    "moe": (True, True, False, False, False),
    "bert": (False, False, True, True, True),
    "vit": (False, False, False, True, True),
}


@dataclass(frozen=True)
class Model:
    """A transformer's shape.

    ``ffn`` defaults to 4 · hidden (gated: 8/3 · hidden, rounded up to 256) and for ``moe`` is the width of
    one expert. ``vocab`` of ``vit`` is its number of classes. ``kv_heads`` defaults to ``heads``.
    ``shared_experts`` run for every token; the first ``dense_layers`` layers of a MoE have one dense MLP of
    ``dense_ffn``. ``head_dim`` defaults to hidden / heads; of a MoE whose hidden / heads is below 128 to what the
    published ones have (128 with grouped K and V, else 64), and one with as many K and V heads is taken for latent
    attention (DeepSeek's): weights as hidden / heads, a core 160 wide a head (``core_width``: all heads
    together). ``params_exact`` overrides the counted parameters (a module that was counted).
    """

    arch: str = "gpt"
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int = 50304
    experts: int = 0
    top_k: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    dense_ffn: int | None = None
    head_dim: int | None = None
    core_width: int | None = None
    gated: bool | None = None
    tied: bool | None = None
    positions: int = 2048
    params_exact: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise SpecError(
                f"arch is {self.arch!r}",
                code="S134",
                where="model.arch",
                expected="one of " + ", ".join(ARCHITECTURES),
            )
        for field in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "head_dim"):
            value = getattr(self, field)
            if value is None and field in ("kv_heads", "ffn", "head_dim"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(
                    f"{field} is {value!r}",
                    code="S134",
                    where=f"model.{field}",
                    expected="a whole number ≥ 1",
                )
        if self.heads > self.hidden and self.head_dim is None:
            raise SpecError(
                f"{self.heads} heads do not fit a hidden width of {self.hidden}",
                code="S134",
                where="model.heads",
                expected="at most `hidden` heads, or head_dim",
            )
        for field in ("experts", "top_k", "shared_experts", "dense_layers"):
            if getattr(self, field) is None:
                object.__setattr__(self, field, 0)
        if self.arch == "moe" and (self.experts < 1 or not 1 <= self.top_k <= self.experts):
            raise SpecError(
                f"experts is {self.experts} and top_k is {self.top_k}",
                code="S134",
                where="model",
                expected="experts ≥ 1 and 1 ≤ top_k ≤ experts for arch moe",
            )
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        narrow = self.arch == "moe" and self.hidden < 128 * self.heads and self.head_dim is None
        if narrow and self.kv_heads == self.heads and self.core_width is None and self.heads >= 64:
            object.__setattr__(self, "core_width", 160 * self.heads)
        elif narrow and self.kv_heads != self.heads:
            object.__setattr__(self, "head_dim", 128 if self.hidden // self.heads >= 64 else 64)
        if self.gated is None:
            object.__setattr__(self, "gated", ARCHITECTURES[self.arch][0])
        if self.tied is None:
            object.__setattr__(self, "tied", ARCHITECTURES[self.arch][2])
        if self.ffn is None:
            width = -(-8 * self.hidden // 3 // 256) * 256 if self.gated else 4 * self.hidden
            object.__setattr__(self, "ffn", width)

    # -- other ways in ---------------------------------------------------------------------------------

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any] | Any) -> Model:
        """From a Hugging Face config (a dict, ``config.json`` parsed, or the object). No transformers import."""
        from serai.plan.sources import model_from_hf

        return model_from_hf(config)

    @classmethod
    def from_module(cls, module: Any, *, seq_len: int = 2048) -> Model:
        """From a ``torch.nn.Module`` (the meta device is enough): parameters exact, shape read off its layers."""
        from serai.plan.sources import model_from_module

        return model_from_module(module, seq_len=seq_len)

    def replace(self, **changes: Any) -> Model:
        return replace(self, **changes)

    # -- widths ----------------------------------------------------------------------------------------

    @cached_property
    def q_dim(self) -> int:
        return self.heads * self.head_dim if self.head_dim else self.hidden

    @cached_property
    def core_dim(self) -> int:
        """Width of the attention core, all heads: what QK^T and PV multiply by."""
        return self.core_width or self.q_dim

    @cached_property
    def kv_dim(self) -> int:
        """Width of K (and of V)."""
        return max(1, self.q_dim * (self.kv_heads or self.heads) // self.heads)

    @property
    def width(self) -> int:
        """The MLP's width as a plain int (never ``None``)."""
        assert self.ffn is not None
        return self.ffn

    @property
    def causal(self) -> bool:
        return ARCHITECTURES[self.arch][1]

    @cached_property
    def moe_layers(self) -> int:
        return max(0, self.layers - self.dense_layers) if self.experts > 1 else 0

    # -- parameters ------------------------------------------------------------------------------------

    @cached_property
    def attention_params(self) -> int:
        bias = self.q_dim + 2 * self.kv_dim + self.hidden if ARCHITECTURES[self.arch][3] else 0
        return self.hidden * (2 * self.q_dim + 2 * self.kv_dim) + bias

    def mlp_params(self, width: int) -> int:
        bias = width + self.hidden if ARCHITECTURES[self.arch][3] else 0
        return (3 if self.gated else 2) * self.hidden * width + bias

    @cached_property
    def norm_params(self) -> int:
        return (4 if ARCHITECTURES[self.arch][3] else 2) * self.hidden

    @cached_property
    def dense_width(self) -> int:
        """MLP width of a layer that is no MoE layer."""
        if self.experts > 1:
            return self.dense_ffn or self.width * (self.top_k + self.shared_experts)
        return self.width

    @cached_property
    def expert_params(self) -> int:
        """Parameters of all routed experts, all layers (what expert parallelism divides)."""
        return self.moe_layers * self.experts * self.mlp_params(self.width)

    @cached_property
    def embedding_params(self) -> int:
        """One vocabulary matrix (ViT: the classifier)."""
        return self.vocab * self.hidden

    @cached_property
    def other_params(self) -> int:
        """All layers without routed experts: attention, dense and shared MLPs, router, norms."""
        dense = (self.layers - self.moe_layers) * self.mlp_params(self.dense_width)
        shared = self.moe_layers * (
            self.shared_experts * self.mlp_params(self.width) + self.hidden * self.experts
        )
        return self.layers * (self.attention_params + self.norm_params) + dense + shared

    @cached_property
    def params(self) -> int:
        """All parameters, embeddings included, tied ones once."""
        if self.params_exact is not None:
            return self.params_exact
        total = self.other_params + self.expert_params + self.embedding_params + self.norm_params // 2
        if self.arch == "vit":
            return total + 768 * self.hidden + 197 * self.hidden  # 16x16x3 patches, positions
        if not self.tied:
            total += self.embedding_params
        if ARCHITECTURES[self.arch][4]:
            total += self.positions * self.hidden
        return total

    @cached_property
    def active_params(self) -> int:
        """Parameters one token passes through: routed experts count top_k of experts."""
        if not self.moe_layers:
            return self.params
        idle = self.moe_layers * (self.experts - self.top_k) * self.mlp_params(self.width)
        return self.params - idle

    # -- FLOPs -----------------------------------------------------------------------------------------

    @cached_property
    def linear_flops(self) -> float:
        """Forward FLOPs a token in the layers' matrix products: 2 · (weights passed through)."""
        gates = 3 if self.gated else 2
        attention = self.layers * self.hidden * (2 * self.q_dim + 2 * self.kv_dim)
        dense = (self.layers - self.moe_layers) * gates * self.hidden * self.dense_width
        moe = self.moe_layers * gates * self.hidden * self.width * (self.top_k + self.shared_experts)
        return 2.0 * (attention + dense + moe + self.moe_layers * self.hidden * self.experts)

    def attention_flops(self, seq: int) -> float:
        """Forward FLOPs a token of QK^T and PV, full square (the non-causal count): 4 · seq · q_dim · layers."""
        return 4.0 * seq * self.core_dim * self.layers

    def forward_flops(self, seq: int, *, causal: bool = False) -> float:
        """Forward FLOPs a token: linear layers, attention, and the vocabulary projection."""
        head = 2.0 * self.hidden * self.vocab
        if self.arch == "vit":
            head = (
                head / seq + 2.0 * 768 * self.hidden
            )  # the classifier sees one token, the patch embedding all
        half = 0.5 if causal and self.causal else 1.0
        return self.linear_flops + half * self.attention_flops(seq) + head

    def flops_per_token(self, seq: int, *, convention: str = "model") -> float:
        """Training FLOPs a token.

        ``model``: 3 × forward, full attention (72·B·L·s·h²·(1+s/6h+V/12Lh) for a plain GPT);
        ``causal``: the same with half the attention; ``hardware``: layers run forward twice (full
        recompute: 96·B·L·s·h²·(1+s/6h+V/16Lh), the convention of the Azure, BLOOM and Megatron SC'21 figures).
        """
        if convention == "causal":
            return 3 * self.forward_flops(seq, causal=True)
        if convention == "hardware":
            return 3 * self.forward_flops(seq) + self.linear_flops + self.attention_flops(seq)
        if convention != "model":
            raise SpecError(
                f"convention is {convention!r}", code="S134", expected="model, causal or hardware"
            )
        return 3 * self.forward_flops(seq)
