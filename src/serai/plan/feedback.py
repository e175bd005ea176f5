"""Predicted against measured for one run of this stack: what a run's report shows.

The caller hands in plain data (it may lie above this room): the resolved job document, the model's shape,
the events of rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from serai.errors import SeraiError
from serai.plan.calibrate import WARM_UP, host_cluster
from serai.plan.cluster import Cluster
from serai.plan.layout import Layout
from serai.plan.model import Model
from serai.plan.predict import predict
from serai.plan.profiles import Profile

__all__ = ["job_cluster", "job_layout", "job_model", "predicted_against_measured"]


def job_model(shape: Mapping[str, Any], vocab_size: int) -> Model:
    """A native job's model from its shape: layers, hidden, heads, kv_heads, ffn, tie_embeddings."""
    return Model(
        "llama",
        layers=int(shape["layers"]),
        hidden=int(shape["hidden"]),
        heads=int(shape["heads"]),
        kv_heads=int(shape["kv_heads"]),
        ffn=int(shape["ffn"]),
        vocab=vocab_size,
        tied=bool(shape.get("tie_embeddings", True)),
        name=str(shape.get("name", "")),
    )


def job_layout(document: Mapping[str, Any]) -> Layout:
    """A native job's layout: FSDP2 is ZeRO-3, DDP ZeRO-0."""
    train, data = document.get("train") or {}, document.get("data") or {}
    strategy = (document.get("parallel") or {}).get("strategy", "fsdp2")
    return Layout(
        zero=3 if strategy == "fsdp2" else 0,
        micro_batch=int(train.get("micro_batch", 1)),
        grad_accum=int(train.get("grad_accumulation", 1)),
        seq_len=int(data.get("seq_len", 256)),
        precision=str(train.get("precision", "fp32")),
        attention="flash",
    )


def job_cluster(document: Mapping[str, Any], cluster: str | None = None) -> Cluster:
    """Where a job runs: ``cluster`` of the catalogue, or this host's CPUs."""
    resources = document.get("resources") or {}
    processes = int(resources.get("processes", 1))
    if cluster is not None:
        return Cluster.named(cluster, int(resources.get("nodes", 1)), processes)
    threads = resources.get("threads")
    return host_cluster(processes, None if threads is None else int(threads))


def predicted_against_measured(
    document: Mapping[str, Any],
    shape: Mapping[str, Any],
    vocab_size: int,
    events: Iterable[Mapping[str, Any]],
    *,
    cluster: str | None = None,
    profile: str | Profile | None = None,
) -> dict[str, Any] | None:
    """One row of a report, or ``None`` where the job is none the planner knows or has too few steps.

    Seconds, 10^9 bytes, ratios. ``inside`` says whether the measured median lies in the 80 % interval;
    ``terms`` are the predicted seconds by name.
    """
    steps = [
        float(e["seconds"])
        for e in events
        if e.get("kind") == "step" and isinstance(e.get("seconds"), (int, float))
    ]
    steps = steps[WARM_UP:]
    if not steps:
        return None
    try:
        p = predict(
            job_model(shape, vocab_size),
            job_cluster(document, cluster),
            job_layout(document),
            profile=profile,
        )
    except (SeraiError, KeyError, TypeError, ValueError):
        return None
    measured = median(steps)
    low, high = p.step_time_interval_s
    return {
        "predicted_step_s": p.step_time_s,
        "predicted_interval_s": [low, high],
        "measured_step_s": measured,
        "ratio": p.step_time_s / measured,
        "inside": low <= measured <= high,
        "steps": len(steps),
        "predicted_memory_gb": p.memory_gb,
        "profile": p.profile,
        "calibrated": p.calibration.measured,
        "terms": p.time_terms(),
        "warnings": list(p.warnings),
    }
