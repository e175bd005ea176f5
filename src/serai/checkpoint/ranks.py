"""The ranks that save and restore together: who am I, and one exchange of small objects with a deadline.

Used when a plan is made and when a checkpoint is restored, never in the steady state of saving.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from serai.errors import CheckpointError

__all__ = ["Ranks"]

EXCHANGE_TIMEOUT_S = 300.0


class Ranks:
    """One process of ``world_size``; ``gather`` gives every rank's object to every rank, in rank order.

    With no process group it stands alone. Beside NCCL it makes a gloo group, so that no exchange waits
    behind the GPU's work.
    """

    def __init__(self, process_group: Any = None) -> None:
        self._group: Any = None
        self.rank = 0
        self.world_size = 1
        self._global_to_group: dict[int, int] = {0: 0}
        if not dist.is_available() or not dist.is_initialized():
            return
        group = process_group if process_group is not None else dist.group.WORLD
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        members = dist.get_process_group_ranks(group)
        self._global_to_group = {int(member): place for place, member in enumerate(members)}
        if self.world_size == 1:
            return
        if "gloo" in str(dist.get_backend(group)):
            self._group = group
        else:
            self._group = dist.new_group(
                members, backend="gloo", timeout=timedelta(seconds=EXCHANGE_TIMEOUT_S)
            )

    @property
    def first(self) -> bool:
        return self.rank == 0

    def to_group(self, global_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Global ranks as places in this group; ranks outside of it are left out."""
        return tuple(self._global_to_group[r] for r in global_ranks if r in self._global_to_group)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in rank order. Raises ``CheckpointError`` when a rank does not answer."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank} could not exchange its checkpoint plan with the other ranks: {error}",
                code="S410",
                expected="every rank calls restore, and save, the same number of times in the same order",
                next_step="look for the first error in the other ranks' logs",
            ) from error
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        return self.gather(value if self.first else None)[0]
