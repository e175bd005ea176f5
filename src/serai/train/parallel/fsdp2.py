"""Fully sharded data parallel (torch's ``fully_shard``): weights, gradients and optimizer state in shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from serai.train.parallel.base import Parallel

__all__ = ["FSDP2"]


class FSDP2(Parallel):
    """One group a decoder block, one for the rest; each is gathered when it is used."""

    def shard(self, model: nn.Module) -> None:
        mesh = init_device_mesh(self.device.type, (self.world,), mesh_dim_names=("shard",))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if self.bf16 else None, reduce_dtype=torch.float32
        )
        for block in model.get_submodule("model.layers").children():
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def accumulate(self, wrapped: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        assert isinstance(wrapped, FSDPModule)
        wrapped.set_requires_gradient_sync(last)
        wrapped.set_is_last_backward(last)
        return nullcontext()

    def compute(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """A forward pass without a backward one leaves the outermost group gathered: shard it again.

        Otherwise a save that follows would see whole plain tensors in place of the optimizer's shards.
        """
        assert isinstance(model, FSDPModule)
        try:
            with super().evaluating(model):
                yield
        finally:
            model.reshard()

    def _whole(self, norm: torch.Tensor) -> float:
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
