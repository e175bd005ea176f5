"""Learns to predict the next byte of Python's own standard library, over any number of processes.

    serai run script.yaml                                         launched, watched, relaunched, resumed
    torchrun --nproc-per-node 2 train.py --checkpoints saves      the same without a supervisor
    python train.py --checkpoints saves                           one process

Three lines make it safe: ``ckpt.restore`` picks up where the last process died, ``ckpt.save`` returns in
milliseconds while the checkpoint is written behind the training, and ``ckpt.close`` waits for the last one.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import serai


class NextByte(nn.Module):
    """A recurrent network over bytes. In: [rows, length] int64 bytes; out: [rows, length, 256] logits."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.recur = nn.GRU(width, width, batch_first=True)
        self.predict = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        hidden, _ = self.recur(self.embed(text))
        logits: Tensor = self.predict(hidden)
        return logits


def read_text() -> Tensor:
    """A few megabytes of Python source, the same on every process: [bytes] uint8."""
    folder = Path(sysconfig.get_path("stdlib"))
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batch(text: Tensor, step: int, *, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [rows, length] each: a pure function of the step and the rank, so that a resumed
    run sees exactly what an uninterrupted one sees."""
    generator = torch.Generator().manual_seed(step * 65_537 + dist.get_rank())
    starts = torch.randint(len(text) - length - 1, (rows, 1), generator=generator)
    window = text[starts + torch.arange(length + 1)].long()
    return window[:, :-1], window[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Predict the next byte.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--rows", type=int, default=16, help="rows a process takes a step")
    parser.add_argument("--length", type=int, default=96, help="bytes a row")
    parser.add_argument(
        "--checkpoints", help="folder or URL; inside `serai run` the run's own place if not given"
    )
    options = parser.parse_args()

    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }.items():
        os.environ.setdefault(name, value)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(1)
    text = read_text()
    network = NextByte().to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    ckpt = serai.Checkpointer(options.checkpoints)
    state = {"model": network, "optimizer": optimizer, "rng": serai.RNG()}
    start = ckpt.restore(state)  # None, or what was restored and from which tier

    for step in range(start.step + 1 if start else 1, options.steps + 1):
        inputs, targets = batch(text, step, rows=options.rows, length=options.length)
        logits = model(inputs.to(device))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % options.save_every == 0 or step == options.steps:
            ckpt.save(step, state, metrics={"loss": loss.item()})
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)

    ckpt.close()  # waits until the last save is durable
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
