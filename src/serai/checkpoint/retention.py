"""Retention by hand: what ``Keep`` would let go, pins, and the newest generation that verifies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from serai.checkpoint.agent.publish import remove_generation, unfinished
from serai.checkpoint.catalog import (
    PIN,
    Damage,
    Generation,
    as_storage,
    check,
    generations,
    is_pinned,
    read_manifest,
    scan,
)
from serai.checkpoint.format import Manifest
from serai.checkpoint.history import append_history
from serai.checkpoint.policy import Candidate, Keep, retained
from serai.errors import CheckpointCorrupt, CheckpointNotFound, StorageError
from serai.storage.base import Storage

__all__ = ["Head", "PruneReport", "head", "pin", "prune", "unpin"]


@dataclass(frozen=True)
class PruneReport:
    """What ``prune`` removes (or with ``dry_run`` would) and what stays, newest first.

    ``unfinished`` are folders of saves that never became checkpoints and are older than the newest one.
    """

    root: str
    dry_run: bool
    removed: tuple[Generation, ...] = field(default=())
    kept: tuple[Generation, ...] = field(default=())
    unfinished: tuple[str, ...] = field(default=())

    @property
    def bytes(self) -> int:
        """Size of the removed generations (hard-linked parts count in each)."""
        return sum(generation.bytes for generation in self.removed)


def prune(
    root: str | Path | Storage,
    keep: Keep,
    *,
    dry_run: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> PruneReport:
    """Remove what ``keep`` lets go and nobody pinned.

    Nothing goes before one of the kept generations has been read back whole and verified; if none of them
    verifies, the newest older one that does is kept as well. Raises ``CheckpointCorrupt`` when none at
    all verifies, ``CheckpointNotFound`` when there is none.
    """
    storage = as_storage(root)
    found = generations(storage)
    if not found:
        raise _nothing(storage)
    keys = retained((Candidate(g.key, g.step, g.metrics, is_pinned(storage, g)) for g in found), keep)
    kept = [g for g in found if g.key in keys]
    doomed = [g for g in found if g.key not in keys]
    leftovers = unfinished(storage, found)
    if doomed or leftovers:
        safe = _first_verified(storage, [*kept, *doomed], progress)
        if safe in doomed:
            doomed.remove(safe)
            kept.append(safe)
    if not dry_run:
        for generation in doomed:
            remove_generation(storage, generation.name)
            append_history(storage, "removed", generation.step, generation.name, generation.bytes, 0.0)
        for name in leftovers:
            remove_generation(storage, name)
    return PruneReport(storage.url, dry_run, tuple(doomed), tuple(kept), tuple(leftovers))


def _first_verified(
    storage: Storage, candidates: list[Generation], progress: Callable[[int, int], None] | None
) -> Generation:
    reasons: list[str] = []
    for generation in candidates:
        damage = _damage(storage, generation, progress)
        if not damage:
            return generation
        reasons.append(str(damage[0]))
    raise CheckpointCorrupt(
        f"nothing is removed: no checkpoint in {storage.url} verifies: " + "; ".join(reasons[:5]),
        where=storage.url,
        expected="at least one that reads back as it was written",
        next_step=f"serai ckpt verify {storage.url}",
    )


def _damage(
    storage: Storage, generation: Generation, progress: Callable[[int, int], None] | None
) -> list[Damage]:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, generation.bytes)

    try:
        return check(storage, generation.name, read_manifest(storage, generation.name), advance=advance)
    except (CheckpointCorrupt, StorageError) as error:
        return [Damage(generation.name, error.message)]


def pin(root: str | Path | Storage, *, step: int | None = None, reason: str = "") -> tuple[Generation, bool]:
    """Keep a generation whatever ``Keep`` says; the generation, and whether it was not pinned before."""
    storage = as_storage(root)
    generation = _generation(storage, step)
    if is_pinned(storage, generation):
        return generation, False
    note = {"time": time.time(), "reason": reason}
    storage.put(f"{generation.name}/{PIN}", json.dumps(note).encode())
    return generation, True


def unpin(root: str | Path | Storage, *, step: int | None = None) -> tuple[Generation, bool]:
    """Take a pin away; the generation, and whether it was pinned."""
    storage = as_storage(root)
    generation = _generation(storage, step)
    if not is_pinned(storage, generation):
        return generation, False
    storage.delete(f"{generation.name}/{PIN}")
    return generation, True


def _generation(storage: Storage, step: int | None) -> Generation:
    found = [g for g in generations(storage) if step is None or g.step == step]
    if not found:
        raise _nothing(storage, step)
    return found[0]


@dataclass(frozen=True)
class Head:
    """The newest generation that verifies, and what newer ones were passed over for."""

    generation: Generation
    passed_over: tuple[str, ...] = ()


def head(
    root: str | Path | Storage,
    *,
    step: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Head:
    """The newest generation (of ``step``) that reads back as it was written.

    Raises ``CheckpointNotFound`` when there is none, ``CheckpointCorrupt`` when none verifies.
    """
    storage = as_storage(root)
    reasons = []
    candidates = []
    for folder, entry in scan(storage):
        if isinstance(entry, Manifest):
            if step in (None, entry.step):
                candidates.append(Generation.of(entry, storage, folder))
        elif step is None:
            reasons.append(str(entry))
    candidates.sort(key=lambda generation: generation.key, reverse=True)
    for generation in candidates:
        damage = _damage(storage, generation, progress)
        if not damage:
            return Head(generation, tuple(reasons))
        reasons.append(str(damage[0]))
    if not reasons:
        raise _nothing(storage, step)
    raise CheckpointCorrupt(
        f"no checkpoint in {storage.url} verifies: " + "; ".join(reasons[:5]),
        where=storage.url,
        next_step=f"serai ckpt verify {storage.url}",
    )


def _nothing(storage: Storage, step: int | None = None) -> CheckpointNotFound:
    which = "checkpoint" if step is None else f"checkpoint of step {step}"
    return CheckpointNotFound(
        f"there is no {which} in {storage.url}", where=storage.url, next_step=f"serai ckpt ls {storage.url}"
    )
