"""What the job file says about where the run takes place and what happens after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from serai.config import BrokenRule, Config

__all__ = ["ResourcesConfig", "RetryConfig"]


class ResourcesConfig(Config):
    """Nodes, processes and devices."""

    nodes: int = Field(1, ge=1, description="Machines; one so far.")
    processes: int = Field(1, ge=1, le=1024, description="Training processes on each node (one a GPU).")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="`auto` takes CUDA when every process can have a GPU, and the CPU otherwise; `cpu` hides the GPUs "
        "from a `script` too.",
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of each process; null: the node's cores shared out evenly."
    )
    master_port: int | None = Field(
        None,
        ge=1024,
        le=65_535,
        description="Port at which the processes find one another; null: a free one is chosen at every launch.",
    )

    def broken_rules(self) -> Iterator[BrokenRule]:
        if self.nodes > 1:
            yield BrokenRule(
                key="nodes",
                message=f"{self.nodes} nodes: this version runs on one node only",
                expected="1",
                next_step="set `nodes: 1`",
            )


class RetryConfig(Config):
    """Relaunches after a failure."""

    max: int = Field(3, ge=0, description="Relaunches after a failure before the run is given up; 0: none.")
    backoff_s: float = Field(
        2.0,
        ge=0,
        le=3600,
        description="Seconds before a relaunch when the last one made no progress; doubles each time, up to 5 minutes.",
    )
    hang_timeout_s: float | None = Field(
        900.0,
        gt=0,
        description="Seconds without a sign of life (a step, an evaluation, a save) after which the processes are "
        "killed and relaunched; null: never.",
    )
    stop_grace_s: float = Field(
        300.0,
        gt=0,
        description="Seconds that a stop request leaves for the last save before the processes are killed.",
    )
