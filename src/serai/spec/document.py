"""The job file as one model: the rooms' configs composed, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from serai.checkpoint.config import CheckpointConfig
from serai.config import BrokenRule, Config
from serai.data.config import DataConfig
from serai.run.config import ResourcesConfig, RetryConfig
from serai.train.config import ModelConfig, ParallelConfig, TrainConfig

__all__ = [
    "LATER_SECTIONS",
    "NAME_PATTERN",
    "NATIVE_SECTIONS",
    "PATH_KEYS",
    "SPEC_VERSION",
    "JobSpec",
    "rows_per_step",
    "section_rules",
]

SPEC_VERSION = 1
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
NATIVE_SECTIONS = ("model", "data", "train", "parallel")
"""What serai's own training loop reads; a script of your own reads none of it."""

PATH_KEYS = ("script", "data.text", "checkpoint.root", "checkpoint.local")
"""Values that are paths, relative to the file that holds them; storage URLs stay as they are."""

LATER_SECTIONS = ("environment", "evaluate", "export", "plan", "track", "serve")
"""Sections that a later version will read. Accepting them today would be a promise that is not kept."""

_SCRIPT_READS = ("root",)


class JobSpec(Config):
    """A job: either serai's own loop (`model`, `data`, `train`) or a script of your own (`script`)."""

    serai: Literal[1] = Field(description="Version of the job file's format.")
    name: str = Field(
        pattern=NAME_PATTERN,
        description="Name of the run: letters, digits, `.`, `_` and `-`, 63 at most. Running the same name again resumes it.",
    )
    model: ModelConfig | None = Field(None, description="The model's layout and size.")
    data: DataConfig | None = Field(None, description="The text to train on.")
    train: TrainConfig | None = Field(None, description="The training loop and its optimizer.")
    parallel: ParallelConfig | None = Field(None, description="How the model is spread over the processes.")
    script: str | None = Field(
        None,
        min_length=1,
        description="A PyTorch script of your own, relative to the job file, instead of `model`, `data` and `train`.",
    )
    args: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="Arguments of the script, each as it would stand on a command line."
    )
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="Saves: how often, where."
    )
    resources: ResourcesConfig = Field(default_factory=ResourcesConfig, description="Processes and devices.")
    retry: RetryConfig = Field(default_factory=RetryConfig, description="What happens after a failure.")

    @model_validator(mode="before")
    @classmethod
    def _default_layout(cls, document: Any) -> Any:
        """serai's own loop always has a layout; a script has none that serai knows of."""
        if isinstance(document, dict) and document.get("script") is None and document.get("parallel") is None:
            return {**document, "parallel": ParallelConfig()}
        return document

    def broken_rules(self) -> Iterator[BrokenRule]:
        present = {key for key in type(self).model_fields if getattr(self, key) not in (None, ())}
        return section_rules(present, checkpoint=self.checkpoint.model_fields_set)

    def to_json(self) -> dict[str, Any]:
        """Every value, defaults included and the preset's shape spelled out; absent sections are left out."""
        document = self.model_dump(mode="json")
        if self.model is not None:
            document["model"].update(asdict(self.model.shape()))
        absent = [key for key in (*NATIVE_SECTIONS, "script") if document[key] is None]
        if self.script is None:
            absent.append("args")
        else:
            document["checkpoint"] = {key: document["checkpoint"][key] for key in _SCRIPT_READS}
        return {key: value for key, value in document.items() if key not in absent}


def section_rules(present: Set[str], *, checkpoint: Set[str]) -> Iterator[BrokenRule]:
    """Rules about which sections stand together; ``checkpoint`` holds the keys written in that section."""
    if "script" not in present:
        for section in ("model", "data", "train"):
            if section not in present:
                yield BrokenRule(
                    key=section,
                    message=f"`{section}` is missing",
                    expected="`model`, `data` and `train`, or `script` for a training script of your own",
                    next_step=f"add `{section}:` (serai explain {section})",
                    code="S103",
                )
        if "args" in present:
            yield BrokenRule(
                key="args",
                message="`args` without `script`",
                expected="`script` beside `args`",
                next_step="add `script: train.py`, or remove `args`",
                code="S115",
            )
        return
    for section in NATIVE_SECTIONS:
        if section in present:
            yield BrokenRule(
                key=section,
                message=f"`{section}` does nothing in a job with a `script`",
                expected="a script of your own, or serai's loop with `model`, `data` and `train`",
                next_step=f"remove `{section}` (hand it to the script with `args`), or remove `script`",
                code="S115",
            )
    for key in sorted(checkpoint - set(_SCRIPT_READS)):
        yield BrokenRule(
            key=f"checkpoint.{key}",
            message=f"`checkpoint.{key}` does nothing in a job with a `script`: the script saves by itself",
            expected="only `checkpoint.root`, which `serai.Checkpointer()` in the script takes up",
            next_step=f"remove `{key}`, and set it in the script's `serai.Checkpointer(...)`",
            code="S115",
        )


def rows_per_step(spec: JobSpec) -> int | None:
    """Rows of data that one optimizer step takes over all processes; ``None`` for a script's job."""
    if spec.train is None:
        return None
    processes = spec.resources.nodes * spec.resources.processes
    return spec.train.micro_batch * spec.train.grad_accumulation * processes
