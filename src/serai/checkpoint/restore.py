"""Restoring over all ranks: agree on the newest generation that everybody can verify, then fill.

Nothing live is touched before every rank has voted yes; an error on one rank is a vote, and all ranks
walk back together.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from serai.checkpoint.agent.client import AgentClient
from serai.checkpoint.bind import Binding, Index, bind
from serai.checkpoint.catalog import Damage, lost_manifest, scan
from serai.checkpoint.format import Manifest
from serai.checkpoint.memory import Mapping
from serai.checkpoint.ranks import Ranks
from serai.checkpoint.source import MemorySource, Source, StorageSource, fill, verify_chunks
from serai.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, SeraiError, StateMismatch
from serai.storage.base import Storage

__all__ = ["Restored", "Skipped", "restore"]

Key = tuple[int, int]
_Place = tuple[Key, str, str]  # generation, tier, folder


@dataclass(frozen=True)
class Skipped:
    """A generation that was passed over, and why."""

    step: int | None
    tier: str
    reason: str


@dataclass(frozen=True)
class Restored:
    """What ``restore`` loaded.

    Attributes:
        step: the step that was saved; go on with the next.
        tier: ``memory``, ``peer``, ``local`` or ``durable``: the nearest tier that had it.
        generation: its name.
        seconds: how long it took.
        bytes: what this rank read.
        skipped: newer generations that did not verify.
        metrics: what was given to ``save``.
    """

    step: int
    tier: str
    generation: str
    seconds: float
    bytes: int
    skipped: tuple[Skipped, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Offer:
    """A generation one rank could read, and how to open it."""

    key: Key
    step: int
    tier: str
    open: Callable[[], Source]
    folder: str = ""

    @property
    def place(self) -> _Place:
        return self.key, self.tier, self.folder


@dataclass(frozen=True)
class _Vote:
    """One rank's word on a generation. ``mismatch`` is no damage: another generation would not help."""

    ok: bool
    reason: str = ""
    mismatch: bool = False


# Nearest first: equal generations are read from the first tier that has them.
_TIERS = ("memory", "local", "durable")


def restore(
    state: MutableMapping[str, Any],
    *,
    ranks: Ranks,
    agent: AgentClient | None,
    storages: Sequence[tuple[str, Storage]],
    step: int | None,
    strict: bool,
    pool: ThreadPoolExecutor,
) -> Restored | None:
    """Load the newest generation (or that of ``step``) into ``state``; ``None`` when there is none.

    ``storages`` are ``(tier, storage)``, nearest first. Raises ``CheckpointCorrupt`` when there are
    generations but none verifies, or the named one does not; ``CheckpointNotFound`` when the named one is
    not there; ``StateMismatch`` when names, shapes or dtypes differ. The state is then untouched.
    """
    began = time.perf_counter()
    skipped: list[Skipped] = []
    torn = False
    tried: set[_Place] = set()
    # Looked at anew after every failure: retention of a live run may have removed what was listed, and
    # then there is something newer.
    while True:
        offers, damaged = _survey(ranks, agent, storages, step)
        place = next((p for p in _agree(ranks, offers) if p not in tried), None)
        if place is None:
            break
        tried.add(place)
        offer = next(o for o in offers if o.place == place)
        outcome = _try(state, offer, ranks, strict, pool)
        if isinstance(outcome, Skipped):
            _pass_over(skipped, outcome, ranks)
            continue
        source, binding, nbytes = outcome
        trouble = _fill(source, binding, ranks, pool)
        if trouble is not None:
            torn = True
            _pass_over(skipped, Skipped(offer.step, offer.tier, trouble), ranks)
            continue
        lost = [] if step is not None else _lost_manifests(storages, offer.key)
        skipped = lost + damaged + skipped
        _tell(skipped, ranks, offer.step)
        return Restored(
            step=offer.step,
            tier=offer.tier,
            generation=source.manifest.name,
            seconds=time.perf_counter() - began,
            bytes=nbytes,
            skipped=tuple(skipped),
            metrics=dict(source.manifest.metrics),
        )
    _nothing(ranks, damaged + skipped, step, [storage.url for _, storage in storages], torn=torn)
    return None


def _lost_manifests(storages: Sequence[tuple[str, Storage]], key: Key) -> list[Skipped]:
    found = [(tier, lost_manifest(storage, key)) for tier, storage in storages]
    return [Skipped(None, tier, str(damage)) for tier, damage in found if damage is not None]


def _pass_over(skipped: list[Skipped], one: Skipped, ranks: Ranks) -> None:
    skipped.append(one)
    if ranks.first:
        warnings.warn(
            f"checkpoint of step {one.step} ({one.tier}) is passed over: {one.reason}", stacklevel=5
        )


def _survey(
    ranks: Ranks, agent: AgentClient | None, storages: Sequence[tuple[str, Storage]], step: int | None
) -> tuple[list[_Offer], list[Skipped]]:
    """What this rank could read. A rank that cannot even look fails all of them, not only itself."""
    offers: list[_Offer] = []
    damaged: list[tuple[str, Damage]] = []
    problem: Exception | None = None
    try:
        offers, damaged = _collect(agent, storages, step)
    except (SeraiError, OSError) as error:
        problem = error
    for rank, trouble in enumerate(ranks.gather(None if problem is None else str(problem))):
        if problem is not None:
            raise problem
        if trouble is not None:
            raise CheckpointError(f"rank {rank} cannot look for checkpoints: {trouble}")
    return offers, [Skipped(None, tier, str(damage)) for tier, damage in damaged]


def _collect(
    agent: AgentClient | None, storages: Sequence[tuple[str, Storage]], step: int | None
) -> tuple[list[_Offer], list[tuple[str, Damage]]]:
    offers: list[_Offer] = []
    damaged: list[tuple[str, Damage]] = []
    if agent is not None:
        for found in agent.ask("memory")["generations"]:
            if found["whole"] and step in (None, found["step"]):
                key = (found["attempt"], found["sequence"])
                offers.append(_Offer(key, found["step"], "memory", _memory_opener(agent, key)))
    for tier, storage in storages:
        for folder, entry in scan(storage):
            if isinstance(entry, Damage):
                damaged.append((tier, entry))
            elif step in (None, entry.step):
                offers.append(
                    _Offer(entry.key, entry.step, tier, _storage_opener(storage, folder, entry, tier), folder)
                )
    return offers, damaged


def _memory_opener(agent: AgentClient, key: Key) -> Callable[[], Source]:
    return lambda: open_memory(agent, key)


def _storage_opener(storage: Storage, folder: str, manifest: Manifest, tier: str) -> Callable[[], Source]:
    return lambda: StorageSource(storage, folder, manifest, tier)


class _HeldMemory(MemorySource):
    """A memory source that tells the agent when it is done with the slots."""

    def __init__(
        self,
        agent: AgentClient,
        hold: int,
        manifest: Manifest,
        values: bytes,
        slots: list[Mapping],
        places: list[tuple[int, int]],
    ) -> None:
        super().__init__(manifest, values, slots, places)
        self._agent = agent
        self._hold = hold

    def close(self) -> None:
        super().close()
        self._agent.ask("shut", hold=self._hold)


def open_memory(agent: AgentClient, key: Key) -> Source:
    """Map a generation that the agent holds. Raises ``CheckpointCorrupt`` when it is gone."""
    answer, fds = agent.ask_with_fds("open", attempt=key[0], sequence=key[1], timeout=120.0)
    try:
        if not answer["found"]:
            raise CheckpointCorrupt(f"generation {key} is no longer in memory")
        sizes = answer["sizes"]
        data, values = (os.pread(fd, size, 0) for fd, size in zip(fds[:2], sizes[:2], strict=True))
        manifest = Manifest.from_bytes(data, "memory")
        slots = [Mapping(fd, size, writable=False) for fd, size in zip(fds[2:], sizes[2:], strict=True)]
        places = [(number, offset) for number, offset in answer["places"]]
        return _HeldMemory(agent, answer["hold"], manifest, values, slots, places)
    finally:
        for fd in fds:
            os.close(fd)


def _agree(ranks: Ranks, offers: list[_Offer]) -> list[_Place]:
    """What every rank can reach, newest first and nearest tier first.

    Two folders may hold one manifest (a copy, a file put into the wrong place): each is a place.
    """
    everyone = ranks.gather({offer.place for offer in offers})
    common = set.intersection(*everyone)
    return sorted(common, key=lambda place: (place[0], -_TIERS.index(place[1]), place[2]), reverse=True)


def _try(
    state: MutableMapping[str, Any], offer: _Offer, ranks: Ranks, strict: bool, pool: ThreadPoolExecutor
) -> tuple[Source, Binding, int] | Skipped:
    """Open, match and verify on every rank; all of them go on only if all of them could."""
    source: Source | None = None
    binding: Binding | None = None
    nbytes = 0
    error: Exception | None = None
    try:
        source = offer.open()
        binding = bind(state, Index(source.manifest, source.values, ranks.rank, ranks.world_size))
        binding.check(strict=strict)
        nbytes = verify_chunks(source, binding.copies, pool)
        vote = _Vote(True)
    except StateMismatch as mismatch:
        error, vote = mismatch, _Vote(False, mismatch.message, mismatch=True)
    except (SeraiError, OSError, MemoryError) as problem:
        error, vote = problem, _Vote(False, getattr(problem, "message", None) or str(problem))
    except Exception as problem:
        reason = f"the state and the checkpoint do not fit: {type(problem).__name__}: {problem}"
        error, vote = StateMismatch(reason), _Vote(False, reason, mismatch=True)
        error.__cause__ = problem
    votes = ranks.gather(vote)
    if all(v.ok for v in votes):
        assert source is not None
        assert binding is not None
        for note in binding.notes:
            warnings.warn(note, stacklevel=5)
        return source, binding, nbytes
    if source is not None:
        source.close()
    if error is not None and vote.mismatch:
        raise error
    others = [(rank, v) for rank, v in enumerate(votes) if not v.ok]
    rank, first = next(((r, v) for r, v in others if v.mismatch), others[0])
    if first.mismatch:
        raise StateMismatch(f"rank {rank}: {first.reason}")
    reason = first.reason if rank == ranks.rank else f"rank {rank}: {first.reason}"
    return Skipped(offer.step, offer.tier, reason)


def _fill(source: Source, binding: Binding, ranks: Ranks, pool: ThreadPoolExecutor) -> str | None:
    """Fill live tensors on every rank; what went wrong on any of them.

    Everything verified a moment ago, so only bytes that changed since can fail here. Then the next
    generation is filled in over it.
    """
    problem: str | None = None
    try:
        fill(source, binding.copies, pool)
    except (SeraiError, OSError) as error:
        problem = getattr(error, "message", None) or str(error)
    found = [(rank, trouble) for rank, trouble in enumerate(ranks.gather(problem)) if trouble is not None]
    refused: Exception | None = None
    try:
        if not found:
            binding.finish()
    except Exception as error:  # whatever a load_state_dict raises about what it was given
        refused = error
    finally:
        source.close()
    if not found:
        # Nobody goes on before everybody is done.
        for rank, trouble in enumerate(ranks.gather(None if refused is None else repr(refused))):
            if trouble is not None:
                raise StateMismatch(
                    f"rank {rank}: the state does not take what was stored: {trouble}",
                    where=source.manifest.name,
                    next_step="build the state anew: parts of it are set already",
                ) from refused
        return None
    rank, trouble = found[0]
    return f"it changed while it was read: {trouble}" if rank == ranks.rank else f"rank {rank}: {trouble}"


def _tell(skipped: list[Skipped], ranks: Ranks, step: int) -> None:
    hidden = [s for s in skipped if s.step is None]
    if hidden and ranks.first:
        warnings.warn(
            f"resuming from step {step}; damaged checkpoints were passed over: "
            + "; ".join(s.reason for s in hidden[:5]),
            stacklevel=4,
        )


def _nothing(ranks: Ranks, skipped: list[Skipped], step: int | None, urls: list[str], *, torn: bool) -> None:
    place = urls[-1] if urls else "memory"
    reasons = [s for group in ranks.gather(skipped) for s in group]
    unique = list(dict.fromkeys(s.reason for s in reasons))
    if unique:
        which = "no checkpoint" if step is None else f"the checkpoint of step {step}, or none of them,"
        raise CheckpointCorrupt(
            f"{which} verifies in {place}: "
            + "; ".join(unique[:5])
            + ("; the state is partly overwritten: build it anew before training goes on" if torn else ""),
            where=place,
            expected="at least one generation whose bytes match their checksums",
            next_step=f"serai ckpt verify {place}",
        )
    if step is not None:
        raise CheckpointNotFound(
            f"there is no checkpoint of step {step} in {place}",
            where=place,
            next_step=f"serai ckpt ls {place}",
        )
