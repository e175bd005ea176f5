"""The slab: fixed slots of anonymous shared memory, owned by the agent, leased to ranks.

A slot goes filling → sealed → (being written by tiers) → free. One that is being read is never given
out, and neither is the newest generation that verified. The agent's death frees everything; a trainer's
death frees nothing that was sealed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from serai.checkpoint.memory import Mapping, available_bytes, round_up

__all__ = ["Slot", "SlotPool"]

# Of the memory that is free when a slot is asked for, this much is left to the trainer.
_LEAVE_FREE = 0.35


class Slot:
    """One memfd, mapped here. ``fd`` is handed to trainers, who map it too."""

    def __init__(self, number: int, size: int, rank: int = 0) -> None:
        self.number = number
        self.rank = rank
        self.size = size
        self.fd = os.memfd_create(f"serai-slot-{number}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self.mapping = Mapping(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.ready = threading.Event()
        self.in_use = False

    def close(self) -> None:
        self.mapping.close()
        os.close(self.fd)


class SlotPool:
    """All slots of a node. Not locked itself: the ledger calls it under its own lock."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._next = 0
        self._faulting = ThreadPoolExecutor(2, thread_name_prefix="serai-fault")
        self._order = ThreadPoolExecutor(1, thread_name_prefix="serai-prefault")

    def free(self, size: int, rank: int) -> Slot | None:
        """The smallest free slot of ``rank`` that holds ``size`` bytes, one that is faulted in first."""
        fitting = [s for s in self._slots.values() if s.rank == rank and not s.in_use and s.size >= size]
        return (
            min(fitting, key=lambda slot: (not slot.ready.is_set(), slot.size, slot.number))
            if fitting
            else None
        )

    def count(self, size: int, rank: int) -> int:
        """Slots of ``rank`` that hold ``size`` bytes, free or not."""
        return sum(slot.size >= size for slot in self._slots.values() if slot.rank == rank)

    def numbers(self) -> list[int]:
        return list(self._slots)

    def room(self, size: int) -> tuple[bool, str]:
        """Whether one more slot of ``size`` bytes may be allocated, and what bounds it if not."""
        free, bound = available_bytes()
        return round_up(size) <= free * (1 - _LEAVE_FREE), bound

    def allocate(self, size: int, rank: int) -> Slot:
        """A new slot for ``rank``; its free slots that are too small are given back first."""
        for slot in [s for s in self._slots.values() if s.rank == rank and not s.in_use and s.size < size]:
            self._release(slot)
        slot = Slot(self._next, round_up(size), rank)
        self._next += 1
        self._slots[slot.number] = slot
        return slot

    def keep_ranks(self, ranks: Iterable[int]) -> None:
        """Give back free slots of ranks that are no longer on this node."""
        kept = set(ranks)
        for slot in [s for s in self._slots.values() if s.rank not in kept and not s.in_use]:
            self._release(slot)

    def _release(self, slot: Slot) -> None:
        del self._slots[slot.number]
        slot.close()

    def prefault(self, slot: Slot, ready: Callable[[Slot], None]) -> None:
        """Fault the slot in, in the background, then say so."""

        def run() -> None:
            try:
                slot.mapping.populate(self._faulting)
            except (MemoryError, ValueError):
                return
            slot.ready.set()
            ready(slot)

        self._order.submit(run)

    @property
    def prefaulted(self) -> bool:
        """Whether touching any slot costs nothing any more."""
        return all(slot.ready.is_set() for slot in self._slots.values())

    @property
    def allocated_bytes(self) -> int:
        return sum(slot.size for slot in self._slots.values())

    def close(self) -> None:
        self._order.shutdown(wait=False, cancel_futures=True)
        self._faulting.shutdown(wait=False, cancel_futures=True)
