"""What is run, in which order, and how much of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import serai
from benchmarks.faults import crashes, damage, failing, kills, peers, stores
from benchmarks.faults.crash import variants
from benchmarks.faults.machine import private_runtime
from benchmarks.faults.tally import Tally

__all__ = ["LEAST", "PARTS", "run"]

LEAST = {"crashes": 1000, "damage": 180, "failing": 15, "stores": 5, "kills": 6, "dcp": 0}
"""Faults that the short version injects at least, by part."""

PARTS = tuple(LEAST)

Progress = Callable[[str], None]


def run(
    tally: Tally, *, seed: int, short: bool, only: Sequence[str] | None = None, progress: Progress = print
) -> None:
    """Run the parts named in ``only`` (all by default) and count into ``tally``."""
    act: dict[str, Callable[[], None]] = {
        "crashes": lambda: _crashes(tally, seed, short, progress),
        "damage": lambda: damage.try_damage(
            tally, seed=seed, flips_in_shards=20 if short else 800, every_byte=not short
        ),
        "failing": lambda: failing.try_failing(tally, stride=17 if short else 1),
        "stores": lambda: stores.try_stores(tally, stride=9 if short else 1),
        "kills": lambda: kills.try_kills(tally, seed=seed, count=12 if short else 312, progress=progress),
        "dcp": lambda: peers.try_dcp(tally, seed=seed, flips=10 if short else 250),
    }
    with private_runtime():
        for part in PARTS:
            if only and part not in only:
                continue
            progress(f"{part} …")
            act[part]()
            progress(f"{part}: {tally.total()} faults so far, {tally.forbidden()} forbidden outcomes")


def _crashes(tally: Tally, seed: int, short: bool, progress: Progress) -> None:
    """Every history, then histories that begin in a crash image of another one."""
    recorded = []
    for name, act in crashes.HISTORIES.items():
        history = crashes.record(name, act)
        crashes.try_history(history, tally, seed=seed, per_point=1 if short else 24)
        progress(f"  {name}: {len(history.calls)} calls, {tally.total()} images so far")
        recorded.append(history)
    rng = random.Random(f"{seed}/after")
    for number in range(2 if short else 40):
        before = rng.choice(recorded)
        images = list(variants(before.calls, rng, 1, before.start))
        _, _, image, key = images[rng.randrange(len(images))]
        keep = serai.Keep(last=rng.choice((1, 2)))
        after = crashes.record(
            f"after a crash of {before.name!r} ({number})",
            lambda plot, keep=keep: plot.run([100, 101], keep=keep),
            image,
            before.saves,
        )
        crashes.try_history(replace(after, start_durable=key), tally, seed=seed, per_point=0 if short else 2)
