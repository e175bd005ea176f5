"""Every error serai raises on purpose, drawn once, by who must act.

    SeraiError
    ├── SpecError            the person who wrote the job file or the command line (exit 2)
    ├── EnvironmentFault     whoever owns the machine: a missing extra, a port, a permission, memory (exit 1)
    │   └── Unreachable      a service or cluster does not answer (exit 69)
    ├── StorageError         whoever owns the storage (exit 1)
    │   ├── NotFoundInStorage, StorageDenied, StorageFull
    │   └── StorageTransient worth a retry: time-outs, 5xx, short reads
    │       └── StorageUnreachable   no answer at all; an Unreachable as well (exit 69)
    ├── CheckpointError      the checkpoint engine (exit 1)
    │   ├── CheckpointNotFound
    │   ├── CheckpointCorrupt    bytes do not verify; never loaded silently
    │   ├── StateMismatch        names, shapes or dtypes of the live state and the checkpoint differ
    │   ├── SaveFailed           a save that will never become durable
    │   └── UnsafeObject         pickle refused by the allow-list
    ├── TrainingError        the training script or its numbers (exit 1)
    ├── GateNotMet           an evaluation gate (exit 3)
    └── StoppedEarly         stopped on request, resumable (exit 75)

Each carries a stable code (``serai explain CODE``), what was true, where, what was expected and the
exact thing to type next. The texts behind the codes live in ``explanations.toml``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = [
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointNotFound",
    "EnvironmentFault",
    "GateNotMet",
    "NotFoundInStorage",
    "Problem",
    "SaveFailed",
    "SeraiError",
    "SpecError",
    "StateMismatch",
    "StoppedEarly",
    "StorageDenied",
    "StorageError",
    "StorageFull",
    "StorageTransient",
    "StorageUnreachable",
    "TrainingError",
    "Unreachable",
    "UnsafeObject",
]


class SeraiError(Exception):
    """Base of every error serai raises on purpose.

    Args:
        message: what was true, one sentence, no trailing full stop needed.
        code: stable identifier such as ``"S401"``; ``serai explain`` knows it.
        where: ``file:line:column``, a key path, a tensor name, or a file and offset.
        expected: what would have been right.
        next_step: the exact thing to type or do next.
    """

    default_code = "S000"
    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        where: str | None = None,
        expected: str | None = None,
        next_step: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.where = where
        self.expected = expected
        self.next_step = next_step

    def __str__(self) -> str:
        parts = [f"[{self.code}] {self.message}"]
        if self.where:
            parts.append(f"  where:    {self.where}")
        if self.expected:
            parts.append(f"  expected: {self.expected}")
        if self.next_step:
            parts.append(f"  next:     {self.next_step}")
        return "\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The one object that ``--json`` prints for a failure."""
        return {
            "schema_version": 1,
            "error": {
                "code": self.code,
                "kind": type(self).__name__,
                "message": self.message,
                "where": self.where,
                "expected": self.expected,
                "next": self.next_step,
            },
            "exit_code": self.exit_code,
        }


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a job file or command line.

    ``line`` and ``column`` count from 1; ``width`` is how many characters the caret underlines.
    """

    code: str
    message: str
    file: str | None = None
    line: int | None = None
    column: int | None = None
    width: int = 1
    key: str | None = None
    source: str | None = None
    expected: str | None = None
    next_step: str | None = None

    @property
    def where(self) -> str | None:
        position = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        if position and self.key:
            return f"{position} ({self.key})"
        return position or self.key


class SpecError(SeraiError):
    """The job file or the command line is wrong; holds every problem at once."""

    default_code = "S100"
    exit_code = 2

    def __init__(self, message: str, *, problems: list[Problem] | None = None, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.problems = problems or []

    def to_json(self) -> dict[str, Any]:
        document = super().to_json()
        document["error"]["problems"] = [
            {
                "code": p.code,
                "message": p.message,
                "file": p.file,
                "line": p.line,
                "column": p.column,
                "key": p.key,
                "expected": p.expected,
                "next": p.next_step,
            }
            for p in self.problems
        ]
        return document


class EnvironmentFault(SeraiError):
    default_code = "S200"


class Unreachable(EnvironmentFault):
    default_code = "S210"
    exit_code = 69


class StorageError(SeraiError):
    default_code = "S300"


class NotFoundInStorage(StorageError):
    default_code = "S301"


class StorageDenied(StorageError):
    default_code = "S302"


class StorageFull(StorageError):
    default_code = "S303"


class StorageTransient(StorageError):
    default_code = "S304"


class StorageUnreachable(StorageTransient, Unreachable):
    default_code = "S311"
    exit_code = 69


class CheckpointError(SeraiError):
    default_code = "S400"


class CheckpointNotFound(CheckpointError):
    default_code = "S401"


class CheckpointCorrupt(CheckpointError):
    default_code = "S402"


class StateMismatch(CheckpointError):
    default_code = "S403"


class SaveFailed(CheckpointError):
    default_code = "S404"


class UnsafeObject(CheckpointError):
    default_code = "S405"


class TrainingError(SeraiError):
    default_code = "S600"


class GateNotMet(SeraiError):
    default_code = "S700"
    exit_code = 3


class StoppedEarly(SeraiError):
    default_code = "S500"
    exit_code = 75
