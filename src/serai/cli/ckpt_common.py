"""What the ``serai ckpt`` commands share: what a target stands for, a progress line, documents."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Annotated, Any

import typer

from serai.cli.runs import complete_run
from serai.cli.session import Session

__all__ = [
    "Progress",
    "Step",
    "Target",
    "checkpoint_root",
    "damage_document",
    "generation_document",
    "plain_place",
]

Target = Annotated[
    str,
    typer.Argument(
        metavar="REF|ROOT",
        help="A run (name, id prefix, @last), a folder or a storage URL.",
        autocompletion=complete_run,
    ),
]
Step = Annotated[
    int | None,
    typer.Option("--step", metavar="N", help="The checkpoint of this step; the newest if not given."),
]


def checkpoint_root(session: Session, target: str) -> str:
    """The checkpoint root that a run, a folder or a URL stands for; a run's name comes first."""
    if "://" in target:
        return target
    from serai.errors import SpecError
    from serai.run.job import Job
    from serai.run.workspace import Workspace

    looks_like_path = os.sep in target or target in (".", "..")
    try:
        if looks_like_path and os.path.isdir(target):
            return os.path.abspath(target)
        run = Workspace(session.workspace).find(target)
    except SpecError:
        if os.path.isdir(target):
            return os.path.abspath(target)
        raise
    return Job.from_document(run.resolved(), folder=run.job_folder(run.state())).checkpoint_root(run.path)


def plain_place(url: str) -> str:
    """A ``file://`` URL as the path that shells and scripts want; any other URL as it is."""
    if not url.startswith("file://"):
        return url
    from urllib.parse import unquote, urlsplit

    return unquote(urlsplit(url).path)


class Progress:
    """One line on stderr: redrawn on a terminal, else a plain one every five seconds; none with ``--json``.

    Called with (bytes done, bytes in all).
    """

    def __init__(self, session: Session, verb: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._verb = verb
        self._silent = session.json or session.quiet
        self._live = not self._silent and sys.stderr.isatty()
        self._pause = 0.1 if self._live else 5.0
        self._clock = clock
        self._began = clock()
        self._due = self._began + self._pause
        self._drawn = False

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if self._silent or now < self._due:
            return
        self._due = now + self._pause
        from serai.units import format_bandwidth, format_bytes

        share = f" of {format_bytes(total)} ({done / total:.0%})" if total else ""
        speed = format_bandwidth(done / max(1e-9, now - self._began))
        line = f"{self._verb} {format_bytes(done)}{share} at {speed}"
        if self._live:
            self._drawn = True
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
        else:
            print(line, file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def generation_document(generation: Any) -> dict[str, Any]:
    return {
        "step": generation.step,
        "name": generation.name,
        "attempt": generation.attempt,
        "sequence": generation.sequence,
        "created": generation.created,
        "bytes": generation.bytes,
        "world": generation.world,
        "metrics": dict(generation.metrics),
        "url": generation.url,
    }


def damage_document(damage: Any) -> dict[str, Any]:
    return {
        "generation": damage.generation,
        "file": damage.file,
        "offset": damage.offset,
        "reason": damage.reason,
        "tensors": list(damage.tensors),
    }
