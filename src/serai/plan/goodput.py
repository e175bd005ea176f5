"""Goodput under failures: Young's and Daly's intervals, and a discrete-event run that checks them.

Failures of a GPU-hour rate: 1 in 50,000 GPU-hours is what one public 54-day run of 16,384 H100 saw
(419 unexpected interruptions; arXiv:2407.21783, section 3.3.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from serai.errors import SpecError

__all__ = ["Goodput", "daly_interval", "expected_goodput", "simulate", "young_interval"]

#: GPU-hours between two interruptions of a job.
GPU_HOURS_BETWEEN_FAILURES = 50_000.0


def young_interval(stall_s: float, mtbf_s: float) -> float:
    """√(2 · stall · MTBF): Young 1974."""
    _positive(stall_s=stall_s, mtbf_s=mtbf_s)
    return sqrt(2 * stall_s * mtbf_s)


def daly_interval(stall_s: float, mtbf_s: float) -> float:
    """Daly 2006, higher order: useful seconds between two saves, for a save that stalls ``stall_s``."""
    _positive(stall_s=stall_s, mtbf_s=mtbf_s)
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return sqrt(2 * stall_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - stall_s


def expected_goodput(
    interval_s: float, stall_s: float, mtbf_s: float, recovery_s: float, lag_s: float = 0.0
) -> float:
    """Share of useful time, first order in interval/MTBF.

    One interval costs ``stall_s``; a failure costs half an interval, the ``lag_s`` until a save is durable,
    and ``recovery_s`` until training runs again.
    """
    _positive(interval_s=interval_s, mtbf_s=mtbf_s)
    saving = interval_s / (interval_s + stall_s)
    lost = (interval_s / 2 + lag_s + recovery_s) / mtbf_s
    return saving / (1 + lost)


@dataclass(frozen=True)
class Goodput:
    """Shares of the wall-clock time over all replicas; they add up to 1. ``interval_80`` over the replicas."""

    useful: float
    saving: float
    lost: float
    recovering: float
    interval_80: tuple[float, float]
    failures: float
    interval_s: float
    mtbf_s: float


def simulate(
    *,
    gpus: int,
    interval_s: float,
    stall_s: float,
    recovery_s: float,
    lag_s: float = 0.0,
    days: float = 28.0,
    gpu_hours_between_failures: float = GPU_HOURS_BETWEEN_FAILURES,
    shape: float = 1.0,
    replicas: int = 64,
    seed: int = 0,
) -> Goodput:
    """Run the job event by event for ``days``, ``replicas`` times.

    Events: a save begins every ``interval_s`` of useful work and stalls ``stall_s``; it counts as durable
    ``lag_s`` later; failures come with Weibull(``shape``) gaps of mean gpu_hours_between_failures / gpus
    (also during saves and recoveries); after one, recovery takes ``recovery_s`` and work resumes from the
    newest durable save.
    """
    _positive(
        interval_s=interval_s, gpu_hours_between_failures=gpu_hours_between_failures, days=days, shape=shape
    )
    from math import gamma

    mtbf = gpu_hours_between_failures * 3600 / gpus
    scale = mtbf / gamma(1 + 1 / shape)
    generator = np.random.default_rng(seed)
    horizon = days * 86400
    shares = np.zeros((replicas, 4))
    failures = 0
    for replica in range(replicas):
        useful, saving, lost, recovering, count = _one_life(
            generator, horizon, interval_s, stall_s, recovery_s, lag_s, scale, shape
        )
        shares[replica] = np.array([useful, saving, lost, recovering]) / horizon
        failures += count
    low, high = np.quantile(shares[:, 0], [0.1, 0.9])
    mean = shares.mean(axis=0)
    return Goodput(
        float(mean[0]), float(mean[1]), float(mean[2]), float(mean[3]), (float(low), float(high)), failures / replicas, interval_s, mtbf
    )  # fmt: skip


def _one_life(
    generator: np.random.Generator,
    horizon: float,
    interval: float,
    stall: float,
    recovery: float,
    lag: float,
    scale: float,
    shape: float,
) -> tuple[float, float, float, float, int]:
    """Seconds (useful, saving, lost, recovering) and failures of one replica.

    Between two failures the schedule is known, so each gap is one event: as many whole (interval + stall)
    cycles as fit, and of them those whose save was durable ``lag`` before the failure.
    """
    clock = useful = saving = lost = recovering = 0.0
    count = 0
    cycle = interval + stall
    while clock < horizon:
        gap = float(scale * generator.weibull(shape))
        gap = min(gap, horizon - clock)
        clock += gap
        ended = clock >= horizon
        begin = min(gap, recovery) if count else 0.0
        recovering += begin
        work = gap - begin
        whole = int(work // cycle)
        rest = work - whole * cycle
        done = whole * interval + min(rest, interval)
        pause = whole * stall + max(0.0, rest - interval)
        if ended:
            useful += done
            saving += pause
            break
        # a save counts when it ended at least `lag` before the failure
        durable = min(whole, int(max(0.0, work - lag) // cycle))
        kept = durable * interval
        useful += kept
        saving += pause
        lost += done - kept
        count += 1
    return useful, saving, lost, recovering, count


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise SpecError(f"{name} is {value!r}", code="S138", where="goodput", expected="a number above 0")
