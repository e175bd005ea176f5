"""What several commands say about a run: found by reference, summed up, listed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serai.cli.session import Session
from serai.units import format_duration

if TYPE_CHECKING:
    from serai.run.workspace import Run

__all__ = ["age", "complete_run", "find_run", "run_line", "table"]

_TAIL_BYTES = 64 << 10


def find_run(session: Session, ref: str) -> Run:
    """The run that a name, an id or a unique prefix of one, or ``@last`` stands for."""
    from serai.run.workspace import Workspace

    return Workspace(session.workspace).find(ref)


def run_line(run: Run) -> dict[str, Any]:
    """One run in short, without reading its whole history."""
    state = run.state()
    step = _last_step(run.rank_events(0))
    return {
        "id": run.id,
        "name": run.name,
        "status": state["status"],
        "step": step.get("step"),
        "total_steps": (run.resolved().get("train") or {}).get("steps"),
        "loss": step.get("loss"),
        "created": state.get("created"),
        "attempts": state.get("attempts"),
        "exit_code": state.get("exit_code"),
        "path": str(run.path),
    }


def age(then: float | None) -> str:
    """How long ago a unix time was: ``12 s ago``, ``3 h ago``."""
    if then is None:
        return "-"
    seconds = max(0.0, time.time() - then)
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago"


def table(header: list[str], rows: list[list[str]], *, right: set[int] = frozenset()) -> str:  # type: ignore[assignment]
    """Aligned columns; those in ``right`` to the right."""
    widths = [max(len(row[index]) for row in [header, *rows]) for index in range(len(header))]
    return "\n".join(
        "  ".join(
            f"{cell:>{width}}" if index in right else f"{cell:<{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [header, *rows]
    )


def complete_run(incomplete: str) -> list[str]:
    """Shell completion of a reference: names of the runs in ``.serai``."""
    try:
        folders = os.listdir(Path(".serai") / "runs")
    except OSError:
        return []
    names = {folder.rpartition("-")[0] for folder in folders if not folder.startswith(".")}
    return sorted(name for name in {*names, "@last"} if name.startswith(incomplete))


def seconds_text(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


def _last_step(path: Path) -> dict[str, Any]:
    """The newest ``step`` event, read from the end of the file."""
    try:
        with open(path, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _TAIL_BYTES))
            lines = stream.read().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines):
        if b'"step"' not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("kind") == "step":
            return event
    return {}
