"""Fit the constants to measurements: a few logs, a Gaussian prior on each, Gauss–Newton with damping.

The residual of a row is log(predicted / measured) under a Huber loss, so that a misprinted row cannot pull
the fit. A first fit over all sources (each weighing the same) gives the defaults, which unseen clusters
use; a profile then moves only the constants in ``PROFILE_PRIOR``, held back by that prior.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from serai.plan.constants import Constants
from serai.plan.published import Row
from serai.plan.step import step_terms

__all__ = [
    "DEFAULT_PRIOR",
    "PROFILE_PRIOR",
    "fit",
    "fit_defaults",
    "fit_profile",
    "log_error",
    "predict_step",
]

#: Standard deviation of log(constant) around its physical guess, for the defaults …
DEFAULT_PRIOR: dict[str, float] = {
    "gemm": 0.15, "gemm_low": 0.2, "balance": 0.5, "misaligned": 0.3, "attention": 0.3, "passes": 0.4, "launch_us": 0.7,
    "intra": 0.15, "alpha_us": 0.5, "inter": 0.4, "decay": 0.5, "overlap": 0.3, "tp_exposed": 0.15, "dp_exposed": 0.25,
    "pp_exposed": 0.3, "step_ms": 0.7, "moe_exposed": 0.3,
}  # fmt: skip
#: … and around the defaults, for one profile.
PROFILE_PRIOR: dict[str, float] = {
    "gemm": 0.15, "gemm_low": 0.15, "balance": 0.4, "attention": 0.4, "passes": 0.4, "launch_us": 0.7, "inter": 0.4,
    "decay": 0.5, "overlap": 0.25, "tp_exposed": 0.4, "dp_exposed": 0.5, "step_ms": 0.7, "misaligned": 0.15, "alpha_us": 0.4,
    "intra": 0.15, "pp_exposed": 0.5, "moe_exposed": 0.3,
}  # fmt: skip
_HUBER = 0.15
_NOISE = 0.05
_FLOORS = {"overlap": 1.0}
_CAPS = {"gemm": 1.06, "gemm_low": 1.15, "misaligned": 1.0, "attention": 1.2, "intra": 0.95, "inter": 0.92, "tp_exposed": 1.5, "dp_exposed": 1.1, "pp_exposed": 1.1}  # fmt: skip


def predict_step(row: Row, k: Constants) -> float:
    """Seconds of one row's step under ``k``."""
    assert row.layout.zero is not None
    return sum(term.seconds for term in step_terms(row.model, row.cluster, row.layout, k, row.layout.zero))


def log_error(row: Row, k: Constants) -> float:
    assert row.step_time_s is not None
    return float(np.log(predict_step(row, k) / row.step_time_s))


def fit(
    residuals: Callable[[Constants], np.ndarray],
    weights: np.ndarray,
    start: Constants,
    prior: dict[str, float],
    *,
    rounds: int = 12,
    bounded: bool = True,
) -> Constants:
    """Minimise Σ weight · huber(residual)/noise² + Σ (log move / prior)² over the logs named in ``prior``."""
    names = [name for name in prior if getattr(start, name) > 0]
    spread = np.array([prior[name] for name in names])
    floors = np.array(
        [
            np.log(_FLOORS.get(name, 0.0) / getattr(start, name)) if name in _FLOORS else -np.inf
            for name in names
        ]
    )
    tops = np.array([np.log(_CAPS.get(name, np.inf) / getattr(start, name)) for name in names])
    if not bounded:
        floors[:], tops[:] = -np.inf, np.inf
    logs = np.zeros(len(names))

    def at(point: np.ndarray) -> np.ndarray:
        return residuals(start.scaled(dict(zip(names, point, strict=True))))

    def cost(point: np.ndarray, error: np.ndarray) -> float:
        size = np.abs(error)
        huber = np.where(size < _HUBER, size**2, 2 * _HUBER * size - _HUBER**2)
        return float(weights @ huber / _NOISE**2 + ((point / spread) ** 2).sum())

    error = at(logs)
    now, damping = cost(logs, error), 1e-2
    for _ in range(rounds):
        step = 1e-3
        jacobian = np.stack([(at(logs + step * unit) - error) / step for unit in np.eye(len(names))], axis=1)
        share = weights * np.minimum(1.0, _HUBER / np.maximum(np.abs(error), 1e-12)) / _NOISE**2
        normal = jacobian.T @ (share[:, None] * jacobian) + np.diag(spread**-2.0)
        slope = jacobian.T @ (share * error) + logs / spread**2
        for _ in range(8):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slope)
            trial = np.clip(logs - move, floors, tops)
            tried = at(trial)
            then = cost(trial, tried)
            if then < now:
                logs, error, damping = trial, tried, damping / 4
                break
            damping *= 4
        else:
            break
        if now - then < 1e-4 * now:
            break
        now = then
    return start.scaled(dict(zip(names, logs, strict=True)))


def thin(rows: Sequence[Row], most: int = 150) -> list[Row]:
    """At most ``most`` rows of each source, evenly picked: a sweep of a thousand near-equal runs says no more."""
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    picked: list[Row] = []
    for members in by_source.values():
        stride = max(1, -(-len(members) // most))
        picked += members[::stride]
    return picked


def fit_defaults(rows: Sequence[Row], start: Constants | None = None) -> Constants:
    """The constants of a cluster nobody measured: one fit over all timed rows, each profile weighing the same
    (one with fewer than twenty rows less)."""
    timed = [row for row in thin(rows) if row.step_time_s]
    count: dict[str | None, int] = defaultdict(int)
    for row in timed:
        count[row.profile] += 1
    weights = np.array([10.0 * min(1.0, count[row.profile] / 20) / count[row.profile] for row in timed])
    return fit(
        lambda k: np.array([log_error(row, k) for row in timed]), weights, start or Constants(), DEFAULT_PRIOR
    )


def fit_profile(rows: Sequence[Row], defaults: Constants) -> Constants:
    """A profile's own constants, held near the defaults by ``PROFILE_PRIOR``."""
    timed = [row for row in thin(rows) if row.step_time_s]
    count = Counter(row.source for row in timed)
    weights = np.array([min(1.0, 60.0 / len(count) / count[row.source]) for row in timed])
    return fit(lambda k: np.array([log_error(row, k) for row in timed]), weights, defaults, PROFILE_PRIOR)
