"""The process group: joined once, with a deadline, and one small all-reduce a step."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from serai.errors import EnvironmentFault
from serai.train.launched import Launched

__all__ = ["choose_device", "join", "make_deterministic", "sum_over_ranks", "values_of_ranks"]


def choose_device(wanted: str, launched: Launched) -> torch.device:
    """The device of this process: ``"auto"`` takes CUDA when every process of the node can have a GPU.

    Raises:
        EnvironmentFault: ``"cuda"`` is asked for and there are too few GPUs (S231).
    """
    gpus = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if gpus >= launched.local_world:
        return torch.device("cuda", launched.local_rank)
    if wanted != "cuda":
        return torch.device("cpu")
    raise EnvironmentFault(
        f"{launched.local_world} processes on this node need a GPU each: {gpus} found",
        code="S231",
        where="resources.processes",
        expected="at most as many processes on a node as it has GPUs",
        next_step=f"set `resources: {{processes: {gpus}}}`" if gpus else "set `resources: {device: cpu}`",
    )


def join(launched: Launched, device: torch.device, *, timeout_s: float) -> None:
    """Join the process group: gloo on the CPU, NCCL on CUDA.

    Every collective fails after ``timeout_s`` seconds instead of torch's half an hour. Keys in the store
    begin with the attempt: relaunched processes that share an agent's store would otherwise find the
    addresses of dead ones (torch 2.13).
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    store: Store
    if launched.master is None:
        store = HashStore()
    else:
        host, port = launched.master
        is_master = launched.rank == 0 and not launched.agent_store
        store = TCPStore(
            host, port, launched.world, is_master=is_master, timeout=timeout, wait_for_workers=False
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"serai/{launched.attempt}", store),
        rank=launched.rank,
        world_size=launched.world,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Sums of each value over all ranks, in double precision, equal on every rank."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor.tolist()]


def values_of_ranks(value: float, device: torch.device) -> list[float]:
    """The value of every rank, in their order."""
    own = torch.tensor([value], dtype=torch.float64, device=device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return [float(part) for part in parts]


def make_deterministic(device: torch.device) -> None:
    """Ask for the same bits from the same inputs where that costs nothing: on the CPU.

    On CUDA deterministic kernels are slower and some do not exist, so nothing is forced there.
    """
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
