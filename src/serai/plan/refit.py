"""Refit every profile from a folder of published measurements: ``python -m serai.plan.refit FOLDER``.

The four headline rows of the announced stack are never fitted on: they judge the result.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serai.plan.constants import Constants
from serai.plan.fit import fit_defaults, fit_profile, log_error
from serai.plan.memory import MemoryConstants
from serai.plan.profiles import Profile, coordinates, profile_file, write_profile
from serai.plan.published import Row, read_folder

__all__ = ["Fitted", "fit_all", "main"]

#: What memory snapshots of one stack hold beyond the formulas; the default elsewhere.
_MEMORY = {
    "a100/megatron-deepspeed-2022": MemoryConstants(9.0, 0.06, 6.0),
    "ndm-a100-v4/deepspeed-2022": MemoryConstants(4.0, 0.05, 4.0),
}


@dataclass(frozen=True)
class Fitted:
    """All profiles by name, ``default`` among them."""

    profiles: dict[str, Profile]

    def constants(self, name: str | None) -> Constants:
        return self.profiles[name if name in self.profiles else "default"].constants


def timed(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.step_time_s and row.headline is None]


def hull(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    points = [coordinates(row.model, row.cluster, row.layout) for row in rows]
    return {name: (min(p[name] for p in points), max(p[name] for p in points)) for name in points[0]}


def half_width(errors: np.ndarray) -> float:
    """Half-width that holds 80 % of ``errors``; with few rows the quantile is inflated (t-like)."""
    return float(np.quantile(np.abs(errors), 0.8) * (1 + 2.0 / len(errors))) if len(errors) else 0.3


def fit_all(rows: Sequence[Row], *, between: float = 0.25) -> Fitted:
    """Defaults, then every profile that ``rows`` name."""
    usable = timed(rows)
    defaults = fit_defaults(usable)
    by_profile: dict[str, list[Row]] = defaultdict(list)
    for row in usable:
        if row.profile:
            by_profile[row.profile].append(row)
    profiles: dict[str, Profile] = {}
    for name, members in by_profile.items():
        k = fit_profile(members, defaults)
        errors = np.array([log_error(row, k) for row in members])
        profiles[name] = Profile(
            name, k, _MEMORY.get(name, MemoryConstants()), max(0.04, half_width(errors)), between, 0.05,
            len(members), hull(members), tuple(sorted({row.source for row in members})),
        )  # fmt: skip
    errors = np.array([log_error(row, defaults) for row in usable])
    profiles["default"] = Profile("default", defaults, MemoryConstants(), max(half_width(errors), between), between, 0.05,
        len(usable), hull(usable), tuple(sorted({row.source for row in usable})))  # fmt: skip
    return Fitted(profiles)


def main(arguments: Sequence[str] | None = None) -> int:
    folder = Path((arguments or sys.argv[1:])[0])
    fitted = fit_all(read_folder(folder))
    for name, profile in sorted(fitted.profiles.items()):
        write_profile(profile, profile_file(name))
        print(f"{name:32s} {profile.rows:5d} rows, 80 % within ±{profile.spread:.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
