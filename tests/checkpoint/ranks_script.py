"""A tiny training job for ``test_ranks``: one process of several, told by torchrun's variables.

python ranks_script.py ROOT ddp|fsdp|plain|diverged STEPS [kill STEP]
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import serai
from serai.errors import CheckpointError


def main() -> None:
    root, layout, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    kill_at = int(sys.argv[5]) if len(sys.argv) > 4 else -1
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 1031), nn.ReLU(), nn.Linear(1031, 12))
    if layout == "fsdp":
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    elif layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif layout == "diverged":
        nn.init.constant_(model[0].weight, float(rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = {"rank": rank, "tensor": torch.full((3,), float(rank))}
    state = {"model": model, "optimizer": optimizer, "mine": mine, "rng": serai.RNG()}
    checkpointer = serai.Checkpointer(root)
    restored = checkpointer.restore(state)
    if restored is not None:
        print("restored", restored.step, restored.tier, flush=True)
    for step in range(restored.step + 1 if restored else 0, steps):
        batch = torch.randn(48, 64, generator=torch.Generator().manual_seed(step))
        part = batch.chunk(world)[rank] if layout != "diverged" else batch
        optimizer.zero_grad()
        loss = model(part).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        print("step", step, (total.item() / world).hex(), flush=True)
        with torch.no_grad():
            model(part)  # an evaluation: FSDP2 leaves its root group gathered after it
        handle = checkpointer.save(step, state)
        if layout == "diverged":
            try:
                handle.wait(timeout=60)
            except CheckpointError as error:
                print(error)
        if step == kill_at:
            handle.wait("memory", timeout=30)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    if layout != "diverged":
        checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
