"""Forks trainers on request, with torch already imported: a trainer starts in milliseconds.

Reads one JSON job a line from stdin and answers with the new trainer's process group. A trainer resumes,
saves as fast as it can, and keeps a diary, each line one atomic append:

    R step tier ok|BAD…   what it resumed from, and whether every byte was that step's
    S step                save is about to be called
    C step seconds        save returned
    D step                the engine says that this step is durable
    X text                it failed
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import nn

import serai

__all__ = ["main", "mark_of"]

_ELEMENTS = 70_000


def make(step: int, rank: int) -> dict[str, Any]:
    """A state that says ``step`` everywhere. The first parameter is large enough to be cut over ranks."""
    model = nn.Module()
    for name, count in (("large", 6 * _ELEMENTS), ("small", 300)):
        model.register_parameter(name, nn.Parameter(torch.full((count,), float(step)).view(-1, 10)))
    return {"model": model, "own": {"rank": torch.full((_ELEMENTS,), step)}, "step": step}


def fill(state: dict[str, Any], step: int) -> None:
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(float(step))
    state["own"]["rank"].fill_(step)
    state["step"] = step


def mark_of(state: dict[str, Any]) -> int | str:
    """The step that every byte of a loaded state belongs to, or what is mixed."""
    model = state["model"]
    tensors = dict(model.items()) if isinstance(model, dict) else dict(model.named_parameters())
    for name, tensor in [*tensors.items(), ("own", state["own"]["rank"])]:
        if not bool((tensor == state["step"]).all()):
            found = sorted({int(value) for value in tensor.detach().flatten().unique()})[:5]
            return f"{name} holds steps {found} in a checkpoint of step {state['step']}"
    return int(state["step"])


def train(job: dict[str, Any], rank: int) -> None:
    diary = os.open(f"{job['diary']}.{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(line: str) -> None:
        os.write(diary, line.encode() + b"\n")

    try:
        if job["ranks"] > 1:
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{job['meeting']}",
                rank=rank,
                world_size=job["ranks"],
                timeout=timedelta(seconds=60),
            )
        _loop(job, rank, note)
    except BaseException as error:
        text = traceback.format_exc().strip().replace("\n", " | ")[-1500:]
        note(f"X {type(error).__name__}: {text}")
        raise


def _loop(job: dict[str, Any], rank: int, note: Any) -> None:
    state = make(0, rank)
    checkpointer = serai.Checkpointer(job["root"], keep=serai.Keep(last=job["keep"]), memory=job["memory"])
    restored = checkpointer.restore(state)
    step = 0
    if restored is not None:
        step = restored.step
        mark = mark_of(state)
        note(f"R {step} {restored.tier} {'ok' if mark == step else f'BAD {mark}'}")
    else:
        note("R 0 none ok")
    told = None
    while True:
        step += 1
        fill(state, step)
        note(f"S {step}")
        began = time.monotonic()
        checkpointer.save(step, state)
        note(f"C {step} {time.monotonic() - began:.3f}")
        until = time.monotonic() + job["pause"]
        while True:
            durable = checkpointer.last_durable
            if durable is not None and durable.step != told:
                told = durable.step
                note(f"D {told}")
            if time.monotonic() >= until:
                break
            time.sleep(0.001)
        if job["ranks"] > 1:
            torch.distributed.barrier()


def _fork(job: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    with contextlib.suppress(BaseException):
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(job["environment"])
        warnings.simplefilter("ignore")
        logging.getLogger("serai").setLevel(logging.CRITICAL)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        rank = 0
        for other in range(1, job["ranks"]):
            if os.fork() == 0:
                rank = other
                break
        train(job, rank)
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for trainers: no zombies
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        print(_fork(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
