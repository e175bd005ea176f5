"""The few fitted constants, each with a meaning. Profiles (``profiles/*.toml``) hold their values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

__all__ = ["Constants"]


@dataclass(frozen=True)
class Constants:
    """What data sheets do not say. Dimensionless unless the name says otherwise.

    gemm            share of the measured matmul ceiling that large products reach inside a training step
    gemm_low        the same again for fp8 and fp4, relative to their own ceiling
    balance         half-saturation size of a product, in units of the chip's FLOP : HBM-byte ratio
    misaligned      rate factor when a dimension of a product is no multiple of 64
    attention       flash attention's rate relative to large products
    passes          HBM traffic of element-wise work relative to fully fused kernels
    launch_us       host microseconds to issue one layer's forward pass
    intra           share of NVLink that collectives reach
    alpha_us        latency of one collective inside a node, microseconds
    inter           share of the node network that collectives reach at 16 nodes
    decay           exponent of its loss with more nodes: (nodes/16) ** -decay
    overlap         exponent of the smooth maximum that joins sharded traffic and compute (1 = no overlap)
    tp_exposed      share of tensor-parallel traffic that compute does not hide
    dp_exposed      share of gradient traffic that the backward pass does not hide
    pp_exposed      share of pipeline sends that compute does not hide
    moe_exposed     share of expert all-to-all that compute does not hide
    imbalance       slowest expert's tokens over the mean
    step_ms         fixed host time of a step, milliseconds
    """

    gemm: float = 0.88
    gemm_low: float = 0.80
    balance: float = 0.5
    misaligned: float = 0.75
    attention: float = 0.60
    passes: float = 1.6
    launch_us: float = 350.0
    intra: float = 0.75
    alpha_us: float = 45.0
    inter: float = 0.55
    decay: float = 0.20
    overlap: float = 1.8
    tp_exposed: float = 0.9
    dp_exposed: float = 0.5
    pp_exposed: float = 0.7
    moe_exposed: float = 0.8
    imbalance: float = 1.25
    step_ms: float = 8.0

    def scaled(self, logs: dict[str, float]) -> Constants:
        """Each named constant times exp(log)."""
        from math import exp

        return replace(self, **{name: getattr(self, name) * exp(value) for name, value in logs.items()})

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))
