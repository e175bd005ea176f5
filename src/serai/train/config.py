"""What the job file says about the model, the training loop and how it is spread over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from serai.config import BrokenRule, Config

__all__ = ["PRESETS", "ModelConfig", "ModelShape", "ParallelConfig", "PresetName", "TrainConfig"]


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer in the Llama layout (RMSNorm, rotary positions, SwiGLU, grouped-query attention).

    Attributes:
        layers: decoder blocks.
        hidden: width of the residual stream.
        heads: query heads; each is ``hidden // heads`` wide.
        kv_heads: key and value heads, shared by ``heads // kv_heads`` query heads each.
        ffn: width of the feed-forward network.
        rope_theta: base of the rotary position frequencies.
        tie_embeddings: whether the output layer shares the input embedding's weight.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    rope_theta: float = 10_000.0
    tie_embeddings: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def parameters(self, vocab_size: int) -> int:
        """Trainable parameters, embeddings included (a tied embedding counts once)."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * self.head_dim
        block = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        embeddings = vocab_size * self.hidden * (1 if self.tie_embeddings else 2)
        return self.layers * block + self.hidden + embeddings


PresetName = Literal["tiny", "small", "125m", "350m", "1b", "3b", "7b", "8b", "13b", "70b"]
PRESETS: dict[PresetName, ModelShape] = {
    "tiny": ModelShape(layers=4, hidden=128, heads=4, kv_heads=2, ffn=352),
    "small": ModelShape(layers=6, hidden=384, heads=6, kv_heads=3, ffn=1024),
    "125m": ModelShape(layers=12, hidden=768, heads=12, kv_heads=12, ffn=2048),
    "350m": ModelShape(layers=24, hidden=1024, heads=16, kv_heads=16, ffn=2816),
    "1b": ModelShape(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, rope_theta=500_000.0),
    "3b": ModelShape(layers=28, hidden=3072, heads=24, kv_heads=8, ffn=8192, rope_theta=500_000.0),
    "7b": ModelShape(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11_008, tie_embeddings=False),
    "8b": ModelShape(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14_336, rope_theta=500_000.0, tie_embeddings=False
    ),
    "13b": ModelShape(layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13_824, tie_embeddings=False),
    "70b": ModelShape(
        layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28_672, rope_theta=500_000.0, tie_embeddings=False
    ),
}
"""Named shapes, small to large. From ``1b`` on they are those of the Llama models of that size."""


class ModelConfig(Config):
    """A preset, and what differs from it."""

    family: Literal["llama"] = Field("llama", description="Model layout; `llama` is the only one so far.")
    preset: PresetName = Field("small", description="Named shape that the keys below override.")
    layers: int | None = Field(None, ge=1, le=1024, description="Decoder blocks.")
    hidden: int | None = Field(None, ge=2, le=131_072, description="Width of the residual stream.")
    heads: int | None = Field(None, ge=1, le=4096, description="Query heads; must divide `hidden`.")
    kv_heads: int | None = Field(
        None, ge=1, le=4096, description="Key and value heads (grouped-query attention); must divide `heads`."
    )
    ffn: int | None = Field(None, ge=1, le=1_048_576, description="Width of the feed-forward network.")
    rope_theta: float | None = Field(None, gt=0, description="Base of the rotary position frequencies.")
    tie_embeddings: bool | None = Field(
        None, description="Whether the output layer shares the input embedding's weight."
    )

    def shape(self) -> ModelShape:
        """The preset's shape with this config's overrides."""
        preset = PRESETS[self.preset]
        return ModelShape(
            layers=preset.layers if self.layers is None else self.layers,
            hidden=preset.hidden if self.hidden is None else self.hidden,
            heads=preset.heads if self.heads is None else self.heads,
            kv_heads=preset.kv_heads if self.kv_heads is None else self.kv_heads,
            ffn=preset.ffn if self.ffn is None else self.ffn,
            rope_theta=preset.rope_theta if self.rope_theta is None else self.rope_theta,
            tie_embeddings=preset.tie_embeddings if self.tie_embeddings is None else self.tie_embeddings,
        )

    def broken_rules(self) -> Iterator[BrokenRule]:
        shape = self.shape()
        if shape.hidden % shape.heads:
            yield BrokenRule(
                key=self._written("heads", "hidden"),
                message=f"{shape.heads} heads do not divide a hidden width of {shape.hidden}",
                expected="`hidden` to be a multiple of `heads`",
                next_step=f"set `heads: {_nearest_divisor(shape.hidden, shape.heads)}`",
            )
        elif shape.head_dim % 2:
            yield BrokenRule(
                key=self._written("heads", "hidden"),
                message=f"a head is {shape.head_dim} wide (hidden {shape.hidden} / {shape.heads} heads), an odd number",
                expected="an even head width, because rotary positions turn pairs",
                next_step=f"set `hidden: {shape.heads * (shape.head_dim + 1)}`",
            )
        if shape.heads % shape.kv_heads:
            yield BrokenRule(
                key=self._written("kv_heads", "heads"),
                message=f"{shape.kv_heads} key and value heads do not divide {shape.heads} query heads",
                expected="`heads` to be a multiple of `kv_heads`",
                next_step=f"set `kv_heads: {_nearest_divisor(shape.heads, shape.kv_heads)}`",
            )

    def _written(self, *keys: str) -> str:
        """The first of the keys that was written rather than taken from the preset."""
        return next((key for key in keys if getattr(self, key) is not None), keys[0])


class TrainConfig(Config):
    """The training loop: how long, how much a step, and the optimizer."""

    steps: int = Field(ge=1, description="Optimizer steps of the whole run.")
    micro_batch: int = Field(8, ge=1, description="Rows that one process puts through the model at once.")
    grad_accumulation: int = Field(
        1, ge=1, description="Micro batches whose gradients are summed before one optimizer step."
    )
    learning_rate: float = Field(3e-4, gt=0, le=10, description="Peak learning rate of AdamW.")
    min_learning_rate_ratio: float = Field(
        0.1, ge=0, le=1, description="Learning rate at the last step, as a share of the peak (cosine decay)."
    )
    warmup_steps: int = Field(
        0, ge=0, description="Steps over which the learning rate rises linearly from zero to its peak."
    )
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay; not on norms and biases.")
    betas: Annotated[tuple[float, float], Field(strict=False)] = Field(
        (0.9, 0.95), description="Decay of AdamW's first and second moments."
    )
    epsilon: float = Field(1e-8, gt=0, description="AdamW's denominator offset.")
    clip_norm: float | None = Field(
        1.0, gt=0, description="Global gradient norm above which gradients are scaled down; null: never."
    )
    seed: int = Field(1, ge=0, lt=2**32, description="Seed of initial weights and data order.")
    precision: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Compute type of the forward and backward pass; master weights and reductions stay fp32.",
    )
    evaluate_every: int | None = Field(
        100, ge=1, description="Steps between validations; null: only at the end."
    )
    evaluate_rows: int = Field(
        256, ge=1, description="Validation rows that one validation reads at most, the same ones each time."
    )
    log_every: int = Field(
        1, ge=1, description="Steps between two `step` events (the last step always has one)."
    )
    collective_timeout_s: float = Field(
        300.0, ge=1, description="Seconds after which a collective that waits for a lost rank fails."
    )

    def broken_rules(self) -> Iterator[BrokenRule]:
        if self.warmup_steps > self.steps:
            yield BrokenRule(
                key="warmup_steps",
                message=f"{self.warmup_steps} warm-up steps in a run of {self.steps} steps",
                expected=f"at most `steps` ({self.steps})",
                next_step=f"set `warmup_steps: {max(1, self.steps // 10)}`",
            )
        for index, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                yield BrokenRule(
                    key=f"betas.{index}",
                    message=f"a moment decay of {beta:g}",
                    expected="0 ≤ beta < 1",
                    next_step="set `betas: [0.9, 0.95]`",
                )


class ParallelConfig(Config):
    """How the model is spread over the processes."""

    strategy: Literal["ddp", "fsdp2"] = Field(
        "fsdp2",
        description="`ddp`: every process holds the whole model; `fsdp2`: parameters, gradients and optimizer "
        "state are sharded over the processes.",
    )


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of ``number`` nearest to ``wanted``; the larger of two that are equally near."""
    divisors = (candidate for candidate in range(1, number + 1) if number % candidate == 0)
    return min(divisors, key=lambda candidate: (abs(candidate - wanted), -candidate))
