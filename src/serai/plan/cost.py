"""Time and money to train, checkpoint bytes, and what storage must carry."""

from __future__ import annotations

from dataclasses import dataclass

from serai.errors import SpecError
from serai.plan.predict import Prediction

__all__ = ["CheckpointBudget", "DataBudget", "Training", "checkpoint_budget", "data_budget", "training"]


@dataclass(frozen=True)
class Training:
    """Seconds, GPU-hours and dollars to train ``tokens`` tokens; intervals are the step time's 80 % interval.

    ``dollars`` is ``None`` where the catalogue has no price. Prices are on-demand list prices of the
    catalogue, an order of magnitude: give your own with ``dollars_per_gpu_hour``.
    """

    tokens: float
    steps: int
    seconds: float
    seconds_interval: tuple[float, float]
    gpu_hours: float
    dollars: float | None
    dollars_interval: tuple[float, float] | None
    goodput: float
    total_flops: float


def training(
    prediction: Prediction, tokens: float, *, goodput: float = 1.0, dollars_per_gpu_hour: float | None = None
) -> Training:
    """What training ``tokens`` tokens takes at the predicted rate and a share ``goodput`` of useful time."""
    if not 0 < goodput <= 1 or tokens <= 0:
        raise SpecError(
            f"tokens is {tokens!r} and goodput {goodput!r}",
            code="S138",
            where="cost",
            expected="tokens above 0, goodput in (0, 1]",
        )
    cluster = prediction.cluster
    steps = -(-tokens // prediction.tokens_per_step)
    seconds = tokens / prediction.tokens_per_s / goodput
    low, high = (edge / prediction.step_time_s * seconds for edge in prediction.step_time_interval_s)
    price = cluster.dollars_per_gpu_hour if dollars_per_gpu_hour is None else dollars_per_gpu_hour
    rate = None if price is None else price * cluster.gpus / 3600
    return Training(
        tokens=tokens,
        steps=int(steps),
        seconds=seconds,
        seconds_interval=(low, high),
        gpu_hours=seconds * cluster.gpus / 3600,
        dollars=None if rate is None else seconds * rate,
        dollars_interval=None if rate is None else (low * rate, high * rate),
        goodput=goodput,
        total_flops=prediction.model.flops_per_token(prediction.layout.seq_len) * tokens,
    )


@dataclass(frozen=True)
class CheckpointBudget:
    """Sizes in bytes, rates in bytes per second, times in seconds."""

    bytes: float
    bytes_per_gpu: float
    bytes_per_node: float
    copy_s: float
    durable_s: float
    storage_rate: float
    needed_rate: float
    interval_s: float
    fits_host: bool


def checkpoint_budget(
    prediction: Prediction, *, storage_gbps: float = 20.0, interval_s: float = 600.0, slots: int = 2
) -> CheckpointBudget:
    """One checkpoint of weights, fp32 copy and both Adam moments (14 bytes a parameter; fp32: 12).

    ``storage_gbps`` is GB/s (10^9 bytes) of the durable tier in all. ``copy_s`` is the copy of one GPU's
    share to host memory over PCIe, which the training step hides; ``durable_s`` the upload of everything;
    ``needed_rate`` what durable storage must take so that every checkpoint is durable before the next.
    ``slots`` checkpoints must fit a node's host memory.
    """
    cluster = prediction.cluster
    each = 12 if prediction.layout.precision == "fp32" else 14
    size = float(each * prediction.model.params)
    gpu = size / cluster.gpus
    node = size / cluster.nodes
    rate = storage_gbps * 1e9
    free = cluster.host_memory_gb * 1e9 - prediction.host_memory_gb * 1e9
    return CheckpointBudget(
        bytes=size,
        bytes_per_gpu=gpu,
        bytes_per_node=node,
        copy_s=gpu / (cluster.pcie_gbps * 1e9 * 0.8),
        durable_s=size / min(rate, cluster.nodes * cluster.node_bytes_per_s),
        storage_rate=rate,
        needed_rate=size / interval_s,
        interval_s=interval_s,
        fits_host=slots * node <= free,
    )


@dataclass(frozen=True)
class DataBudget:
    """``bytes_per_s`` that the job reads in all and a node; ``nodes_per_account`` one storage account feeds."""

    bytes_per_s: float
    bytes_per_s_per_node: float
    nodes_per_account: int


def data_budget(
    prediction: Prediction, *, bytes_per_sample_token: float = 4.0, account_gbps: float = 60.0
) -> DataBudget:
    """What feeding the job takes.

    ``bytes_per_sample_token`` is 4 for tokens stored as 32-bit integers (an image model: bytes of an image
    over its sequence length); ``account_gbps`` Gb/s (10^9 bits) that one storage account sends out.
    """
    rate = prediction.tokens_per_s * bytes_per_sample_token
    node = rate / prediction.cluster.nodes
    return DataBudget(rate, node, max(0, int(account_gbps * 1e9 / 8 / node)))
