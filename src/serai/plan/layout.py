"""A layout: how one training step is spread over the GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from serai.errors import SpecError

__all__ = ["Layout"]

_PRECISION = ("fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4")
_RECOMPUTE = ("none", "selective", "full")
_OFFLOAD = (None, "optimizer", "all")
_ATTENTION = ("auto", "flash", "math")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes and step shape. Data parallelism is what is left: world / (tp · pp · cp).

    ``zero``: ZeRO stage 0–3, 3 also meaning FSDP full shard, 2 also FSDP SHARD_GRAD_OP; ``None`` lets the
    planner choose. ``virtual_pp``: interleaved stages a rank. ``offload_ratio``: share of the offloaded
    state that lies on the host. ``attention``: ``flash`` never stores the [seq, seq] scores, ``math`` does;
    ``auto`` is flash but for fp16, whose published stacks predate it. ``sequence_parallel``: Megatron's,
    ``None`` means on with selective recompute, and unless fp16 with ZeRO-2/3 or without recompute: full
    recompute and sequence parallelism are alternatives in the Megatron stacks that published figures.
    """

    zero: int | None = None
    tp: int = 1
    pp: int = 1
    virtual_pp: int = 1
    cp: int = 1
    ep: int = 1
    micro_batch: int = 1
    grad_accum: int = 1
    seq_len: int = 2048
    precision: str = "bf16"
    recompute: str = "none"
    offload: str | None = None
    offload_ratio: float = 1.0
    attention: str = "auto"
    sequence_parallel: bool | None = None

    def __post_init__(self) -> None:
        for field in ("tp", "pp", "virtual_pp", "cp", "ep", "micro_batch", "grad_accum", "seq_len"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _wrong(field, value, "a whole number ≥ 1")
        for field, allowed in (
            ("precision", _PRECISION), ("recompute", _RECOMPUTE), ("offload", _OFFLOAD), ("attention", _ATTENTION),
            ("zero", (None, 0, 1, 2, 3)),
        ):  # fmt: skip
            if getattr(self, field) not in allowed:
                raise _wrong(field, getattr(self, field), "one of " + ", ".join(map(str, allowed)))
        if not 0 <= self.offload_ratio <= 1:
            raise _wrong("offload_ratio", self.offload_ratio, "between 0 and 1")

    def data_parallel(self, gpus: int) -> int:
        """World / (tp · pp · cp). Raises ``SpecError`` S133 when that is no whole number."""
        shards = self.tp * self.pp * self.cp
        if gpus % shards:
            raise SpecError(
                f"{gpus} GPUs do not divide by tp {self.tp} · pp {self.pp} · cp {self.cp} = {shards}",
                code="S133",
                where="layout",
                expected="a world size that is a multiple of tp · pp · cp",
                next_step=f"use a multiple of {shards} GPUs, or smaller tp, pp or cp",
            )
        if (gpus // self.pp) % self.ep:
            raise SpecError(
                f"expert parallelism {self.ep} does not divide the {gpus // self.pp} GPUs of a pipeline stage",
                code="S133",
                where="layout.ep",
                expected="ep that divides world / pp",
            )
        return gpus // shards

    def replace(self, **changes: Any) -> Layout:
        """The same layout with some fields changed."""
        return replace(self, **changes)

    @property
    def flash(self) -> bool:
        if self.attention == "auto":
            return self.precision != "fp16" or self.seq_len > 4096
        return self.attention == "flash"

    @property
    def split_sequence(self) -> bool:
        if self.sequence_parallel is None:
            modern = self.precision != "fp16" and (self.recompute == "none" or (self.zero or 0) >= 2)
            return self.tp > 1 and (modern or self.recompute == "selective")
        return self.sequence_parallel and self.tp > 1

    @property
    def family(self) -> str:
        """Which peak the linear layers run at: fp32, half, fp8 or fp4."""
        return {"fp32": "fp32", "fp16": "half", "bf16": "half", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}[
            self.precision
        ]


def _wrong(field: str, value: object, expected: str) -> SpecError:
    return SpecError(f"{field} is {value!r}", code="S132", where=f"layout.{field}", expected=expected)
