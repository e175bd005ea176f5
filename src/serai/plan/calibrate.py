"""Refit three constants from real steps of this machine, and keep them as a profile."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from serai.errors import SpecError
from serai.plan.cluster import Cluster
from serai.plan.constants import Constants
from serai.plan.fit import fit
from serai.plan.layout import Layout
from serai.plan.model import Model
from serai.plan.profiles import COORDINATES, Profile, coordinates
from serai.plan.step import step_terms

__all__ = ["Measured", "calibrate", "calibrated_names", "host_cluster", "measured_from_events"]

#: Steps at the start of an attempt that compile, warm caches and fault in memory.
WARM_UP = 3
STEPS = 20


@dataclass(frozen=True)
class Measured:
    """One run: what it ran, and the seconds of its steps after the warm-up. ``peak_gb`` (10^9 bytes) if known."""

    model: Model
    cluster: Cluster
    layout: Layout
    seconds: tuple[float, ...]
    peak_gb: float | None = None

    @property
    def step_time_s(self) -> float:
        return median(self.seconds)


def host_cluster(processes: int = 1, threads: int | None = None) -> Cluster:
    """This host's CPUs as a cluster of one node: one "GPU" a process, each with its share of cores and memory.

    A guess from the number of cores; ``calibrate`` finds the rates.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = threads or max(1, cores // processes)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    base = Cluster.named("cpu-core", 1, processes)
    return base.replace(
        name="this-host",
        gpu=base.gpu.faster(each),
        hbm_gbps=base.hbm_gbps * min(each, 4),
        memory_gb=memory / processes,
        host_memory_gb=memory,
    )


def measured_from_events(
    events: Iterable[Mapping[str, Any]], model: Model, cluster: Cluster, layout: Layout
) -> Measured:
    """From the ``step`` events of rank 0: the steps after each attempt's warm-up, the last attempt's.

    Raises ``SpecError`` S145 when fewer than 20 are left.
    """
    steps: list[tuple[int, float]] = []
    for event in events:
        if event.get("kind") == "start":
            steps = []
        elif event.get("kind") == "step" and isinstance(event.get("seconds"), (int, float)):
            steps.append((int(event.get("step") or 0), float(event["seconds"])))
    seconds = tuple(value for _, value in steps[WARM_UP:])
    if len(seconds) < STEPS:
        raise SpecError(
            f"the run has {len(seconds)} steps after {WARM_UP} of warm-up",
            code="S145",
            where="calibrate",
            expected=f"at least {STEPS}",
            next_step=f"train {STEPS + WARM_UP} steps or more, then calibrate again",
        )
    return Measured(model, cluster, layout, seconds)


def calibrated_names(runs: Sequence[Measured]) -> tuple[str, str, str]:
    """Which three constants the runs can tell: the compute rate always, then the links if there are any.

    Of one process host time and element-wise traffic; of several on one node what they take from one another and the rate between them
    (start from a profile that single processes calibrated); of several nodes host time and their network.
    """
    if any(run.cluster.nodes > 1 for run in runs):
        return "gemm", "launch_us", "inter"
    if any(run.cluster.gpus > 1 for run in runs):
        return "gemm", "launch_us", "intra"
    return "gemm", "launch_us", "passes"


def calibrate(
    runs: Sequence[Measured], base: Profile, *, name: str = "this-cluster/this-software"
) -> Profile:
    """``base`` with three constants refitted to the medians of ``runs``; its interval from what is left over.

    The prior is wide (a factor of e), so that a slow host is believed; with one run the three share the
    correction by how much each explains.
    """
    if not runs:
        raise SpecError("no run to calibrate on", code="S145", where="calibrate", expected="at least one run")
    names = calibrated_names(runs)

    def errors(k: Constants) -> np.ndarray:
        return np.array([np.log(_seconds(run, k) / run.step_time_s) for run in runs])

    k = fit(
        errors, np.full(len(runs), 4.0), base.constants, dict.fromkeys(names, 1.5), rounds=40, bounded=False
    )
    left = np.abs(errors(k))
    noise = max(
        float(np.quantile(np.abs(np.log(np.array(run.seconds) / run.step_time_s)), 0.8)) for run in runs
    )
    points = [coordinates(run.model, run.cluster, run.layout) for run in runs]
    return replace(
        base,
        name=name,
        constants=k,
        spread=float(max(0.05, np.quantile(left, 0.8) * (1 + 2 / len(runs)), noise)),
        between=min(base.between, 0.20),
        rows=len(runs),
        hull={n: (min(p[n] for p in points), max(p[n] for p in points)) for n in COORDINATES},
        points=tuple(tuple(round(p[n], 2) for n in COORDINATES) for p in points),
        generations=tuple(sorted({run.cluster.gpu.generation for run in runs})),
        sources=("measured steps",),
        measured=True,
    )


def _seconds(run: Measured, k: Constants) -> float:
    zero = 0 if run.layout.zero is None else run.layout.zero
    return sum(term.seconds for term in step_terms(run.model, run.cluster, run.layout, k, zero))
