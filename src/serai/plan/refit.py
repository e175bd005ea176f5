"""Refit every profile from a folder of published measurements: ``python -m serai.plan.refit FOLDER``.

The four headline rows of the announced stack are never fitted on: they judge the result.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from serai.plan.fit import fit_defaults, fit_profile, log_error
from serai.plan.memory import MemoryConstants
from serai.plan.profiles import (
    COORDINATES,
    Profile,
    choose_profile,
    coordinates,
    profile_file,
    write_profile,
)
from serai.plan.published import Row, read_folder

__all__ = ["Fitted", "fit_all", "left_out_fits", "main"]

#: What memory snapshots of one stack hold beyond the formulas; the default elsewhere.
_MEMORY = {
    "a100/megatron-deepspeed-2022": MemoryConstants(10.0, 0.10, 6.0),
    "ndm-a100-v4/megatron-deepspeed-2022": MemoryConstants(3.0, 0.05, 6.0),
    "h100/megatron-2025": MemoryConstants(3.0, 0.05, 2.0),
    "gb200/megatron-2025": MemoryConstants(3.0, 0.05, 2.0),
}
_MOST_POINTS = 64


@dataclass(frozen=True)
class Fitted:
    """All profiles by name, ``default`` among them."""

    profiles: dict[str, Profile]

    def own(self, row: Row) -> Profile:
        """The profile that was fitted on a row's source, else the one an unnamed prediction would take."""
        if row.profile in self.profiles:
            return self.profiles[row.profile]
        return self.chosen(row)

    def chosen(self, row: Row) -> Profile:
        """The profile an unnamed prediction takes."""
        return self.profiles[choose_profile(row.cluster, row.layout, available=self.profiles)]


def timed(rows: Iterable[Row]) -> list[Row]:
    """The rows that are fitted on: with a step time, without the headline points."""
    return [row for row in rows if row.step_time_s and row.headline is None]


def _points(rows: Sequence[Row]) -> tuple[tuple[float, ...], ...]:
    """Where ``rows`` stand, each place once, at most ``_MOST_POINTS`` spread evenly (farthest point first)."""
    places = np.unique(
        np.array(
            [[coordinates(r.model, r.cluster, r.layout)[name] for name in COORDINATES] for r in rows]
        ).round(2),
        axis=0,
    )
    if len(places) > _MOST_POINTS:
        picked = [0]
        nearest = ((places - places[0]) ** 2).sum(axis=1)
        while len(picked) < _MOST_POINTS:
            picked.append(int(nearest.argmax()))
            nearest = np.minimum(nearest, ((places - places[picked[-1]]) ** 2).sum(axis=1))
        places = places[sorted(picked)]
    return tuple(tuple(float(x) for x in place) for place in places)


def _hull(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    points = [coordinates(row.model, row.cluster, row.layout) for row in rows]
    return {name: (min(p[name] for p in points), max(p[name] for p in points)) for name in points[0]}


def _half_width(errors: np.ndarray) -> float:
    """Half-width that holds 80 % of ``errors``; with few rows the quantile is inflated (t-like)."""
    return float(np.quantile(np.abs(errors), 0.8) * (1 + 2.0 / len(errors))) if len(errors) else 0.3


def fit_all(rows: Sequence[Row], *, between: float = 0.30, only: Collection[str] | None = None) -> Fitted:
    """Defaults, then every profile that ``rows`` name. ``between``: see ``Profile``; ``only``: fit these profiles."""
    usable = timed(rows)
    defaults = fit_defaults(usable)
    by_profile: dict[str, list[Row]] = defaultdict(list)
    for row in usable:
        if row.profile and (only is None or row.profile in only):
            by_profile[row.profile].append(row)
    profiles: dict[str, Profile] = {}
    for name, members in by_profile.items():
        k = fit_profile(members, defaults)
        errors = np.array([log_error(row, k) for row in members])
        profiles[name] = Profile(
            name,
            k,
            _MEMORY.get(name, MemoryConstants()),
            max(0.04, _half_width(errors)),
            between,
            rows=len(members),
            hull=_hull(members),
            sources=tuple(sorted({row.source for row in members})),
            points=_points(members),
            generations=tuple(sorted({row.cluster.gpu.generation for row in members})),
        )
    profiles["default"] = Profile(
        "default",
        defaults,
        MemoryConstants(),
        0.10,
        between,
        rows=len(usable),
        hull=_hull(usable),
        sources=tuple(sorted({row.source for row in usable})),
    )
    return Fitted(profiles)


def left_out_fits(rows: Sequence[Row], *, between: float = 0.30) -> dict[str, Fitted]:
    """For every source, the profiles fitted without it."""
    fits: dict[str, Fitted] = {}
    for source in sorted({row.source for row in timed(rows)}):
        rest = [row for row in rows if row.source != source]
        names = {row.profile for row in timed(rest) if row.profile}
        taken = {choose_profile(r.cluster, r.layout, available=names) for r in rows if r.source == source}
        fits[source] = fit_all(rest, between=between, only=taken)
    return fits


def with_between(fitted: Fitted, between: float) -> Fitted:
    return Fitted({name: replace(profile, between=between) for name, profile in fitted.profiles.items()})


def between_sources(rows: Sequence[Row], fits: dict[str, Fitted]) -> float:
    """What another team's software differs by: 80 % quantile of the left-out |log error|, sources weighing the same."""
    sizes: list[float] = []
    weights: list[float] = []
    for source, fitted in fits.items():
        mine = [row for row in timed(rows) if row.source == source]
        sizes += [abs(log_error(row, fitted.chosen(row).constants)) for row in mine]
        weights += [1.0 / len(mine)] * len(mine)
    order = np.argsort(sizes)
    share = np.cumsum(np.array(weights)[order]) / sum(weights)
    return float(np.array(sizes)[order][np.searchsorted(share, 0.8)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit on FOLDER and write the package's profiles."""
    folder = Path((arguments or sys.argv[1:])[0])
    rows = read_folder(folder)
    between = between_sources(rows, left_out_fits(rows))
    fitted = fit_all(rows, between=between)
    for name, profile in sorted(fitted.profiles.items()):
        write_profile(replace(profile, between=between), profile_file(name))
        print(f"{name:36s} {profile.rows:5d} rows, 80 % within ±{profile.spread:.1%}")
    print(f"another team's software on the same hardware: 80 % within ±{between:.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
