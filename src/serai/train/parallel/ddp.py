"""Distributed data parallel: every process holds the whole model, gradients are averaged."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from serai.train.parallel.base import Parallel

__all__ = ["DDP"]


class DDP(Parallel):
    """torch's ``DistributedDataParallel``; nothing at all for a single process."""

    def shard(self, model: nn.Module) -> None:
        pass

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.world == 1:
            return model
        # Weights are equal on all ranks by construction and buffers are constants: nothing to broadcast.
        buffers = [name for name, _ in model.named_buffers()]
        ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, buffers)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            init_sync=False,
            gradient_as_bucket_view=True,
        )
        self._settle_buckets(wrapped)
        return wrapped

    def accumulate(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        if isinstance(wrapped, DistributedDataParallel) and not last:
            return wrapped.no_sync()
        return nullcontext()

    def compute(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def _settle_buckets(self, wrapped: DistributedDataParallel) -> None:
        """Let DDP choose its final buckets before the first step, on a batch that leaves no trace.

        DDP regroups gradients after its first backward pass, and the order in which more than two ranks are
        added depends on a gradient's place in its bucket. Without this, the first step after a resume
        would round differently from the same step of an uninterrupted run.
        """
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=self.device)
        for _ in range(2):  # the regrouping happens at the start of the second pass
            with self.compute():
                wrapped(input_ids=tokens, use_cache=False).logits.sum().backward()
        wrapped.zero_grad(set_to_none=True)
