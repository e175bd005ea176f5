"""What the job file says about checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from serai.config import Config

__all__ = ["CheckpointConfig"]


class CheckpointConfig(Config):
    """How often the run saves, where, and what is kept."""

    every: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        100,
        description="Steps between two saves; `auto` leaves it to serai (100 steps so far). The last step is always "
        "saved.",
    )
    keep_last: int = Field(2, ge=1, description="Newest verified checkpoints that are kept.")
    keep_every: int | None = Field(
        None, ge=1, description="Checkpoints at multiples of this step are kept for good; null: none."
    )
    root: str | None = Field(
        None,
        min_length=1,
        description="Where checkpoints become durable: a folder (relative to the job file) or a storage URL; "
        "null: the run's own folder.",
    )
    local: str | None = Field(
        None, min_length=1, description="A fast local folder that takes each checkpoint before `root` does."
    )
    memory: bool = Field(
        True,
        description="Keep the newest checkpoint in the agent's memory, so that a killed process restores from there.",
    )
    on_error: Literal["warn", "pause", "raise"] = Field(
        "warn", description="What a save that fails in the background does to training."
    )
