"""``serai bench``: measure this machine against peers, as ratios in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serai.cli.session import Session, command
from serai.errors import SpecError

__all__ = ["main"]


@command
def main(
    session: Session,
    what: Annotated[str, typer.Argument(help="What to measure: checkpoint.")],
    size: Annotated[str, typer.Option("--size", help="Bytes of the state: 256MiB, 2GiB.")] = "1GiB",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds; the median counts.")] = 5,
    folder: Annotated[Path, typer.Option("--folder", help="A folder on the disk to measure.")] = Path(),
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the table, the figures and the plot here.")
    ] = None,
) -> None:
    """Measure saving and restoring against torch.save and DCP."""
    if what != "checkpoint":
        raise SpecError(
            f"there is no benchmark {what!r}",
            code="S156",
            where="WHAT",
            expected="checkpoint",
            next_step="serai bench checkpoint",
        )
    from serai.units import parse_bytes

    try:
        count = parse_bytes(size)
    except ValueError as error:
        raise SpecError(
            f"--size: {error}",
            code="S156",
            where="--size",
            expected="a size such as 1GiB",
            next_step="--size 1GiB",
        ) from error
    from serai.bench.checkpoint import run, to_markdown, write

    report = run(size=count, rounds=rounds, folder=folder, say=session.note)
    if out is not None:
        path = write(report, out)
        session.note(f"written to {path}")
    session.emit(report.to_json(), lambda: to_markdown(report))
