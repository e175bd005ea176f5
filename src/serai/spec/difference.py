"""What differs between the job that a run was started with and the job that is asked for now.

What changes the loss curve makes it another run, which needs another name. What may change under the
same name: ``checkpoint``, ``retry``, ``parallel`` and ``resources`` (another layout of the same
computation: the state is resharded), how often the loop reports and validates, how long a collective
waits, and ``micro_batch``, ``grad_accumulation`` and ``processes`` as long as their product, the rows of
one optimizer step, stays the same. A ``script`` decides by itself what its world size means, so only
its path and arguments count.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from serai.errors import Problem, SpecError
from serai.spec.document import JobSpec, rows_per_step
from serai.spec.fields import yaml_text

__all__ = ["Difference", "changed_spec_error", "spec_difference"]

_FREE_SECTIONS = ("checkpoint", "retry", "parallel", "resources")
_FREE_KEYS = (
    "schema_version",
    "train.evaluate_every",
    "train.evaluate_rows",
    "train.log_every",
    "train.collective_timeout_s",
)
_ROWS = ("train.micro_batch", "train.grad_accumulation")
_ROWS_SHOWN = (*_ROWS, "resources.nodes", "resources.processes")


@dataclass(frozen=True)
class Difference:
    """One key whose value differs; ``None`` stands for a key that is absent."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {yaml_text(self.old)} → {yaml_text(self.new)}"


def spec_difference(old: JobSpec, new: JobSpec) -> list[Difference]:
    """Keys that make ``new`` another run than ``old``; empty when ``new`` may resume it."""
    before, after = _flatten(old.to_json()), _flatten(new.to_json())
    same_rows = rows_per_step(old) == rows_per_step(new)
    differences = []
    for key in [*before, *(key for key in after if key not in before)]:
        if before.get(key) == after.get(key):
            continue
        if key in _ROWS_SHOWN and rows_per_step(new) is not None:
            if same_rows:
                continue
        elif key in _FREE_KEYS or key.split(".")[0] in _FREE_SECTIONS:
            continue
        differences.append(Difference(key, before.get(key), after.get(key)))
    return differences


def changed_spec_error(name: str, differences: list[Difference], *, where: str | None = None) -> SpecError:
    """The error for the same name with a changed spec; it shows every difference."""
    problems = [
        Problem(
            code="S127",
            message=f"`{difference.key}` was {yaml_text(difference.old)} and is now {yaml_text(difference.new)}",
            key=difference.key,
            expected=yaml_text(difference.old),
            next_step=f"--set {shlex.quote(f'{difference.key}={yaml_text(difference.old)}')}",
        )
        for difference in differences
    ]
    shown = "; ".join(str(difference) for difference in differences)
    return SpecError(
        f"run {name!r} was started with another spec ({shown})",
        code="S127",
        where=where,
        expected="the same spec to resume it, or another name",
        next_step=f"serai run job.yaml --set name={name}-2",
        problems=problems,
    )


def _flatten(document: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(document, dict):
        flat: dict[str, Any] = {}
        for key, value in document.items():
            flat.update(_flatten(value, f"{prefix}.{key}" if prefix else key))
        return flat
    return {prefix: document}
