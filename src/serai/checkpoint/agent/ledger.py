"""What the agent holds: generations, their shards and slots, and how far each tier is with each.

The rules that keep promises live here, under one lock: no slot that is read is refilled, the newest
verified generation stays, a tier that is slower than the trainer skips what lies between, never the
newest.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from serai.checkpoint.agent.slots import Slot, SlotPool

__all__ = ["Generation", "Key", "Ledger", "NoMemory", "Shard", "State"]

Key = tuple[int, int]

MAX_SLOTS = 3


class NoMemory(Exception):
    """Not even one slot of this size fits; carries what bounds the memory."""


class State(enum.Enum):
    """How far one tier is with one generation."""

    WAITING = "waiting"
    WRITING = "writing"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass
class ShardFile:
    """One file of a rank: where it lies in the slot, and the checksums of its chunks as they become known."""

    name: str
    kind: str
    offset: int
    size: int
    chunks: dict[int, str] = field(default_factory=dict)


@dataclass
class Shard:
    """What one rank sealed: the bytes of its files, in a slot, and what describes them.

    A streamed shard has no slot: its files went to ``streamed_to`` as they were copied.
    """

    rank: int
    slot: Slot | None
    files: list[ShardFile]
    table: list[dict[str, Any]]
    trees: dict[str, Any]
    probes: dict[str, Any]
    metrics: dict[str, float]
    software: dict[str, str]
    plan: str = ""
    streamed_to: str | None = None

    def memory(self, file: ShardFile) -> memoryview:
        assert self.slot is not None, "a streamed shard is not in memory"
        return self.slot.mapping.memory[file.offset : file.offset + file.size]


@dataclass
class Generation:
    """One save of one attempt over the ranks of this node."""

    key: Key
    step: int
    world_size: int
    expected: frozenset[int]
    run: str
    created: float
    protected: bool
    shards: dict[int, Shard] = field(default_factory=dict)
    tiers: dict[str, State] = field(default_factory=dict)
    readers: int = 0
    retry_at: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Every rank of this node has sealed its shard."""
        return self.expected <= self.shards.keys()

    @property
    def whole(self) -> bool:
        """Every rank of the world has its shard on this node."""
        return len(self.shards) == self.world_size

    @property
    def in_memory(self) -> bool:
        """Memory alone can restore it."""
        return self.whole and all(shard.slot is not None for shard in self.shards.values())

    def writing(self) -> bool:
        return any(state is State.WRITING for state in self.tiers.values())

    def settled(self) -> bool:
        return all(state in (State.DONE, State.SKIPPED) for state in self.tiers.values())

    def verified(self) -> bool:
        """Written and checked on at least one tier."""
        return any(state is State.DONE for state in self.tiers.values())


class Ledger:
    """All generations in memory. Thread safe.

    Args:
        tiers: names of the tiers that write, nearest first.
        keep_in_memory: leave the newest verified generation in its slots for a fast restore.
        dropped: called (with the lock held) with a generation that will never be written.
    """

    def __init__(self, tiers: Iterable[str], *, dropped: Callable[[Generation], None]) -> None:
        self.tier_names = list(tiers)
        self.keep_in_memory = True
        self.in_order = False
        self.changed = threading.Condition()
        self.pool = SlotPool()
        self._generations: dict[Key, Generation] = {}
        self._filling: dict[tuple[Key, int], Slot] = {}
        self._dropped = dropped

    # Trainers

    def reserve(self, size: int, rank: int, ready: Callable[[Slot], None]) -> int:
        """Allocate and pre-fault a rank's slots before its first save; how many it has now.

        ``ready`` is called from another thread with each slot once touching it costs nothing.
        """
        with self.changed:
            while self.pool.count(size, rank) < self._slots_each() and self.pool.room(size)[0]:
                self.pool.prefault(self.pool.allocate(size, rank), ready)
            return self.pool.count(size, rank)

    def lease(self, key: Key, rank: int, size: int, deadline: float) -> Slot | None:
        """A slot to fill for ``rank`` of generation ``key``; ``None`` when none came free in time.

        Raises ``NoMemory`` when the machine cannot hold one at all.
        """
        with self.changed:
            # A rank fills one slot at a time: what it leased before and never sealed, it gave up.
            for old in [place for place in self._filling if place[1] == rank]:
                self.abandon(*old)
            while True:
                slot = self.pool.free(size, rank)
                if slot is None and self.pool.count(size, rank) < self._slots_each():
                    fits, bound = self.pool.room(size)
                    if fits:
                        slot = self.pool.allocate(size, rank)
                        slot.ready.set()  # the copy itself faults it in: waiting would not be faster
                    elif self.pool.count(size, rank) == 0:
                        raise NoMemory(bound)
                if slot is not None:
                    slot.in_use = True
                    self._filling[(key, rank)] = slot
                    return slot
                if self._drop_for(key):
                    continue
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self.changed.wait(min(remaining, 1.0))

    def keep_ranks(self, ranks: Iterable[int]) -> None:
        """Free slots of ranks that are not on this node any more are given back."""
        with self.changed:
            self.pool.keep_ranks(ranks)

    def slots(self) -> list[int]:
        """Numbers of the slots that exist; trainers unmap the others."""
        with self.changed:
            return self.pool.numbers()

    def _slots_each(self) -> int:
        return MAX_SLOTS if self.keep_in_memory else MAX_SLOTS - 1

    def seal(self, generation: Generation, shard: Shard) -> Generation:
        """Record a filled shard; the generation becomes visible to tiers when its last one arrives."""
        with self.changed:
            self._filling.pop((generation.key, shard.rank), None)
            known = self._generations.setdefault(generation.key, generation)
            known.tiers = known.tiers or dict.fromkeys(self.tier_names, State.WAITING)
            known.shards[shard.rank] = shard
            if shard.streamed_to is not None:
                for tier in known.tiers:
                    if tier != shard.streamed_to:
                        known.tiers[tier] = State.SKIPPED
            self._collect()
            self.changed.notify_all()
            return known

    def abandon(self, key: Key, rank: int) -> None:
        """Give back a slot that was leased and never sealed."""
        with self.changed:
            slot = self._filling.pop((key, rank), None)
            if slot is not None:
                slot.in_use = False
            self.changed.notify_all()

    def end_session(self) -> None:
        """The trainers are gone: what was being filled, and what some ranks never sealed, is void."""
        with self.changed:
            for key, rank in list(self._filling):
                self.abandon(key, rank)
            for generation in [g for g in self._generations.values() if not g.complete]:
                self._forget(generation)
            self.changed.notify_all()

    # Tiers

    def take(self, tier: str) -> Generation | None:
        """The generation this tier should write next, marked as being written; ``None`` for none now."""
        with self.changed:
            now = time.monotonic()
            waiting = [
                g
                for g in self._ordered()
                if g.complete
                and g.tiers[tier] in (State.WAITING, State.FAILED)
                and g.retry_at.get(tier, 0) <= now
            ]
            if not waiting:
                return None
            due = [g for g in waiting if g.protected or self.in_order]
            chosen = due[0] if due else waiting[-1]
            for other in waiting:
                if other.key < chosen.key and other not in due:
                    other.tiers[tier] = State.SKIPPED
            chosen.tiers[tier] = State.WRITING
            self._collect()
            return chosen

    def next_retry(self, tier: str) -> float | None:
        """When (monotonic seconds) a failed generation should be tried again."""
        with self.changed:
            times = [
                g.retry_at[tier] for g in self._generations.values() if tier in g.retry_at and not g.settled()
            ]
            return min(times) if times else None

    def finish(self, tier: str, generation: Generation, state: State, retry_at: float | None = None) -> None:
        with self.changed:
            generation.tiers[tier] = state
            if retry_at is not None:
                generation.retry_at[tier] = retry_at
            if state is State.DONE:
                for other in self._generations.values():
                    if other.key < generation.key and other.tiers.get(tier) is State.FAILED:
                        other.tiers[tier] = State.SKIPPED
            self._collect()
            self.changed.notify_all()

    # Readers

    def in_memory(self) -> list[Generation]:
        """Generations that memory alone can restore, newest first; each may be pinned with ``hold``."""
        with self.changed:
            return [g for g in reversed(self._ordered()) if g.complete and g.in_memory]

    def hold(self, key: Key) -> Generation | None:
        with self.changed:
            generation = self._generations.get(key)
            if generation is None or not generation.complete or not generation.in_memory:
                return None
            generation.readers += 1
            return generation

    def release(self, generation: Generation) -> None:
        with self.changed:
            generation.readers -= 1
            self._collect()
            self.changed.notify_all()

    def pending(self) -> bool:
        """Whether anything sealed is not yet on every tier that still wants it."""
        with self.changed:
            newest = max((g.key for g in self._generations.values() if g.complete), default=None)
            return any(
                g.writing() or (not g.settled() and (g.protected or g.key == newest))
                for g in self._generations.values()
                if g.complete
            )

    # Rules

    def _ordered(self) -> list[Generation]:
        return [self._generations[key] for key in sorted(self._generations)]

    def _drop_for(self, key: Key) -> bool:
        """Make room for a newer generation: forget a sealed one that no tier has begun; whether one was."""
        if self.in_order:
            return False
        idle = [
            g
            for g in self._ordered()
            if g.key < key
            and g.complete
            and not g.writing()
            and not g.verified()
            and not g.readers
            and not g.protected
        ]
        if not idle:
            return False
        self._forget(idle[0])
        self._dropped(idle[0])
        return True

    def _collect(self) -> None:
        """Free the slots of what nobody needs any more."""
        verified = [g.key for g in self._ordered() if g.complete and g.verified()]
        newest = verified[-1] if verified else None
        for generation in self._ordered():
            if not generation.complete or generation.readers or not generation.settled():
                continue
            if generation.key == newest and self.keep_in_memory:
                continue
            if newest is not None and generation.key > newest:
                continue
            self._forget(generation)

    def _forget(self, generation: Generation) -> None:
        self._generations.pop(generation.key, None)
        for shard in generation.shards.values():
            if shard.slot is not None:
                shard.slot.in_use = False
        self.changed.notify_all()
