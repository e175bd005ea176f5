"""Real checkpoints for tests that read them: one of a single process, one of two ranks with shards."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import serai

__all__ = ["Net", "raw", "same", "save_two_ranks", "trained"]


class Net(nn.Module):
    """Tied weights, a buffer, and one bfloat16 parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(32, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.embed(tokens)) * self.gain.float()
        return self.head(hidden)


def trained(seed: int = 0, steps: int = 2) -> dict[str, Any]:
    """A state after some steps of AdamW."""
    model = Net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        step(model, optimizer)
    return {"model": model, "optimizer": optimizer, "progress": {"seen": [seed, None], "loss": 0.5}}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randint(0, 32, (6,))).square().mean().backward()
    optimizer.step()


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(a: Any, b: Any) -> bool:
    """Equal, bit for bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


_TWO_RANKS = """
import os, sys, torch, serai
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

root, port = sys.argv[1:]
child = os.fork()  # before there is any thread: torch is imported once for both ranks
rank = 1 if child == 0 else 0
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(7)
rows = torch.randn(7, 5)
columns = torch.randn(6, 4, 3).bfloat16()
plain = torch.randn(600, 600)  # large enough to be split over the ranks
state = {
    "weights": {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": distribute_tensor(columns, mesh, [Shard(1)]),
        "whole": distribute_tensor(torch.arange(3), mesh, [Replicate()]),
    },
    "model": torch.nn.ParameterDict({"plain": plain}),
    "mine": {"tensor": torch.full((2,), float(rank)), "rank": rank},
}
with serai.Checkpointer(root) as checkpointer:
    checkpointer.save(3, state, metrics={"loss": 0.25})
dist.destroy_process_group()
if not child:
    os._exit(0)  # a forked interpreter takes seconds to wind torch down
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def save_two_ranks(root: Path) -> dict[str, torch.Tensor]:
    """Save from two processes; the whole tensors, for comparison."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", _TWO_RANKS, str(root), str(port)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    torch.manual_seed(7)
    rows = torch.randn(7, 5)
    columns = torch.randn(6, 4, 3).bfloat16()
    return {"rows": rows, "columns": columns, "whole": torch.arange(3), "plain": torch.randn(600, 600)}


def save(root: Path, state: dict[str, Any], *steps: int) -> None:
    """The same state at every step, with tensors that change a little in between."""
    with serai.Checkpointer(root, keep=serai.Keep(last=100)) as checkpointer:
        for number in steps:
            checkpointer.save(number, state, metrics={"loss": 1.0 / number}).wait("durable", 60)
            step(state["model"], state["optimizer"])
