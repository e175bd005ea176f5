"""What the training loop asks of a way to spread a model over processes. One class a strategy, one file each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

__all__ = ["Parallel"]


class Parallel(ABC):
    """A strategy. The loop calls ``shard`` on the meta model, gives it weights, then calls ``wrap``.

    Args:
        device: of this process.
        world: number of processes.
        precision: ``"fp32"`` or ``"bf16"``: compute type of the passes; weights and reductions are fp32.
    """

    def __init__(self, *, device: torch.device, world: int, precision: str) -> None:
        self.device = device
        self.world = world
        self.bf16 = precision == "bf16"

    @abstractmethod
    def shard(self, model: nn.Module) -> None:
        """Change the meta model in place so that this process will hold its share only."""

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call in training. ``model`` keeps its clean parameter names for checkpoints."""

    @abstractmethod
    def accumulate(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Around the passes of one micro batch: gradients are reduced in the ``last`` one of a step only.

        Gradients come out as the *mean* over ranks, so a loss that is to be summed is scaled by ``world``.
        """

    @abstractmethod
    def compute(self) -> AbstractContextManager[None]:
        """Around every forward pass, for the compute type."""

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Around an evaluation: no gradients, and afterwards the model is as it is between steps."""
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            model.train()

    def clip(self, model: nn.Module, max_norm: float | None) -> float:
        """Scale gradients so that their global norm is at most ``max_norm``; returns the norm before."""
        limit = float("inf") if max_norm is None else max_norm
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        return self._whole(norm)

    def _whole(self, norm: torch.Tensor) -> float:
        return float(norm)
