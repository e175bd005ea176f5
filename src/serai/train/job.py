"""The parts of a resolved job that training reads, each as its own room's config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serai.checkpoint.config import CheckpointConfig
from serai.data.config import DataConfig
from serai.errors import SpecError
from serai.train.config import ModelConfig, ParallelConfig, TrainConfig

__all__ = ["TrainJob"]


@dataclass(frozen=True)
class TrainJob:
    """A resolved job as a worker needs it.

    Attributes:
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        processes: processes over all nodes that the job asks for. The global batch follows from it and
            not from the processes that are really there, so that a smaller world trains the same.
        stop_grace_s: seconds that a stop request leaves for the last save.
    """

    name: str
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    parallel: ParallelConfig
    checkpoint: CheckpointConfig
    device: str
    processes: int
    stop_grace_s: float

    @property
    def global_batch(self) -> int:
        """Rows of one optimizer step over all processes."""
        return self.train.micro_batch * self.train.grad_accumulation * self.processes

    @classmethod
    def read(cls, path: Path) -> TrainJob:
        """Read a ``resolved.json``, leniently: another version of serai may have written it.

        Raises:
            SpecError: it is not there or no native job (S620).
        """
        try:
            document = json.loads(path.read_text())
            return cls.from_document(document)
        except (OSError, ValueError, KeyError) as error:
            raise SpecError(
                f"{path.name} is not the resolved form of a native job: {error}",
                code="S620",
                where=str(path),
                expected="the resolved.json that `serai run` writes, with model, data and train",
                next_step="start the job with `serai run job.yaml`",
            ) from error

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> TrainJob:
        resources = document.get("resources") or {}
        retry = document.get("retry") or {}
        return cls(
            name=str(document.get("name", "job")),
            model=ModelConfig.from_stored(document.get("model") or {}),
            data=DataConfig.from_stored(document["data"]),
            train=TrainConfig.from_stored(document["train"]),
            parallel=ParallelConfig.from_stored(document.get("parallel") or {}),
            checkpoint=CheckpointConfig.from_stored(document.get("checkpoint") or {}),
            device=str(resources.get("device", "auto")),
            processes=int(resources.get("nodes", 1)) * int(resources.get("processes", 1)),
            stop_grace_s=float(retry.get("stop_grace_s", 300.0)),
        )
