"""``serai logs``: what the training processes wrote."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serai.cli.runs import complete_run
from serai.cli.session import SCHEMA_VERSION, Session, command

if TYPE_CHECKING:
    from serai.run.workspace import Run

__all__ = ["main"]

_POLL_S = 0.2


@command
def main(
    session: Session,
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="Name, id prefix or @last.", autocompletion=complete_run)
    ] = "@last",
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", min=0, help="One rank only; all if not given.")
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", metavar="N", min=1, help="Launch attempt; the newest if not given."),
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="LINES", min=0, help="Only the last lines of each rank.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends, over relaunches.")
    ] = False,
) -> int:
    """Print what the training processes wrote to stdout and stderr."""
    from serai.cli.runs import find_run

    run = find_run(session, ref)
    chosen = attempt or _newest_attempt(run)
    if chosen is None and not follow:
        session.note(f"{run.name} has no logs yet")
        return 0
    _check(run, chosen, rank, wait=follow)
    printer = _Printer(session, only=rank)
    if chosen is not None:
        printer.show(run, chosen, tail=tail)
    try:
        return _follow(run, printer, chosen, newer=attempt is None) if follow else printer.finish()
    except KeyboardInterrupt:
        return 130  # the usual way to leave `-f`; nothing more to say


def _follow(run: Run, printer: _Printer, chosen: int | None, *, newer: bool) -> int:
    """Prints what is written until the run ends; with ``newer`` goes on to the attempts after this one."""
    while True:
        alive = run.holder() is not None
        newest = _newest_attempt(run)
        if newer and newest is not None and newest != chosen:
            if chosen is not None:
                printer.show(run, chosen)
                printer.note(f"--- attempt {newest} ---")
            chosen = newest
        if chosen is not None:
            printer.show(run, chosen)
        if not alive:
            return printer.finish()
        time.sleep(_POLL_S)


class _Printer:
    """Prints whole lines, each rank's from where it stopped the last time."""

    def __init__(self, session: Session, *, only: int | None) -> None:
        self._session = session
        self._only = only
        self._offsets: dict[Path, int] = {}
        self._rests: dict[Path, tuple[int, int, bytes]] = {}

    def show(self, run: Run, attempt: int, *, tail: int | None = None) -> None:
        for rank, path in _log_files(run, attempt).items():
            if self._only is not None and rank != self._only:
                continue
            with open(path, "rb") as stream:
                stream.seek(self._offsets.get(path, 0))
                news = stream.read()
            self._offsets[path] = self._offsets.get(path, 0) + len(news)
            *lines, rest = (self._rests.pop(path, (0, 0, b""))[2] + news).split(b"\n")
            if rest:
                self._rests[path] = (rank, attempt, rest)
            for line in lines if tail is None else lines[max(0, len(lines) - tail) :]:
                self._print(rank, attempt, line)
        if not self._session.json:
            print(end="", flush=True)

    def note(self, text: str) -> None:
        self._session.note(text)

    def finish(self) -> int:
        """Prints lines that were never ended; 0, the exit code."""
        for rank, attempt, rest in self._rests.values():
            self._print(rank, attempt, rest)
        self._rests.clear()
        return 0

    def _print(self, rank: int, attempt: int, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if self._session.json:
            document = {"schema_version": SCHEMA_VERSION, "attempt": attempt, "rank": rank, "line": text}
            print(json.dumps(document), flush=True)
        else:
            prefix = "" if self._only is not None else self._session.style(f"[{rank}] ", "dim")
            print(f"{prefix}{text}")


def _check(run: Run, attempt: int | None, rank: int | None, *, wait: bool) -> None:
    from serai.errors import SpecError

    attempts = _attempts(run)
    if attempt is not None and attempt not in attempts:
        raise SpecError(
            f"{run.name} has no attempt {attempt}",
            code="S152",
            where=str(run.path / "logs"),
            expected=f"one of: {', '.join(map(str, attempts)) or 'none yet'}",
            next_step=f"serai show {run.name}",
        )
    if attempt is None or rank is None or wait:
        return
    ranks = list(_log_files(run, attempt))
    if rank not in ranks:
        raise SpecError(
            f"attempt {attempt} of {run.name} has no log of rank {rank}",
            code="S152",
            where=str(run.log_dir(attempt)),
            expected=f"one of: {', '.join(map(str, ranks)) or 'none yet'}",
            next_step=f"serai logs {run.name}",
        )


def _attempts(run: Run) -> list[int]:
    return sorted(
        int(found[1])
        for path in (run.path / "logs").glob("attempt-*")
        if (found := re.fullmatch(r"attempt-(\d+)", path.name))
    )


def _newest_attempt(run: Run) -> int | None:
    """The newest attempt in which a process wrote anything, or the newest at all."""
    attempts = _attempts(run)
    return next(
        (number for number in reversed(attempts) if _log_files(run, number)),
        attempts[-1] if attempts else None,
    )


def _log_files(run: Run, attempt: int) -> dict[int, Path]:
    found = {}
    for path in sorted(run.log_dir(attempt).glob("rank-*.log")):
        if matched := re.fullmatch(r"rank-(\d+)\.log", path.name):
            found[int(matched[1])] = path
    return found
