"""What a rank tells about itself: events, and a sign of life while it is busy with something long."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from serai.events import EventWriter

__all__ = ["Reporter", "StepFigures"]

_BEAT_S = 1.0


@dataclass(frozen=True)
class StepFigures:
    """One step in numbers.

    Attributes:
        step: counted from 1: the number of updates made.
        loss: exact mean over all predicted tokens of the global batch, nats.
        tokens: predicted tokens of the global batch.
        seconds: of the whole step, waiting for data included.
        lr: learning rate of the update.
        grad_norm: global norm before clipping.
        data_wait_s: how long this rank waited for its batch.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    lr: float
    grad_norm: float
    data_wait_s: float


class Reporter:
    """Writes the events of one rank. Rank 0 reports steps; the others show that they live."""

    def __init__(self, events: EventWriter, *, rank: int) -> None:
        self._events = events
        self._rank = rank
        self._last = 0.0

    def write(self, kind: str, **fields: Any) -> None:
        self._events.write(kind, **fields)
        self._last = time.monotonic()

    def start(self, *, world: int, device: torch.device, parameters: int, strategy: str, batch: int) -> None:
        self.write(
            "start",
            world_size=world,
            pid=os.getpid(),
            host=socket.gethostname(),
            device=str(device),
            torch=torch.__version__,
            parameters=parameters,
            strategy=strategy,
            global_batch=batch,
        )

    def step(self, figures: StepFigures) -> None:
        if self._rank == 0:
            self.write(
                "step",
                **asdict(figures),
                loss_hex=figures.loss.hex(),
                tokens_per_s=figures.tokens / figures.seconds,
            )
        else:
            self.beat(step=figures.step)

    def evaluation(self, *, step: int, loss: float, tokens: int, seconds: float, rows: int) -> None:
        if self._rank == 0:
            self.write(
                "evaluation",
                step=step,
                loss=loss,
                loss_hex=loss.hex(),
                tokens=tokens,
                seconds=seconds,
                rows=rows,
            )

    def beat(self, **fields: Any) -> None:
        """A sign of life, at most one a second."""
        if time.monotonic() - self._last >= _BEAT_S:
            self.write("heartbeat", **fields)
