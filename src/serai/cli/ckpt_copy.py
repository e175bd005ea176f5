"""``serai ckpt copy``: bring checkpoints to another storage, verified on both ends."""

from __future__ import annotations

from typing import Annotated

import typer

from serai.cli.ckpt_common import Progress, Step, Target, checkpoint_root
from serai.cli.session import Session, command

__all__ = ["main"]


@command
def main(
    session: Session,
    source: Target,
    target: Annotated[str, typer.Argument(metavar="ROOT", help="A folder or a storage URL.")],
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="All checkpoints, not only one.")] = False,
) -> None:
    """Copy a checkpoint to another root, verified on both ends; what is there already is not sent again."""
    from serai.checkpoint.copying import copy
    from serai.errors import SpecError
    from serai.units import format_bytes

    if every and step is not None:
        raise SpecError("--all and --step exclude each other", code="S150", where="serai ckpt copy")
    root = checkpoint_root(session, source)
    with Progress(session, "copied") as progress:
        report = copy(root, target, step=step, every=every, progress=progress)
    document = {
        "source": report.source,
        "target": report.target,
        "bytes": report.bytes,
        "newest": report.newest,
        "generations": [
            {"name": copied.name, "step": copied.step, "bytes": copied.bytes, "present": copied.present}
            for copied in report.generations
        ],
    }

    def text() -> str:
        lines = []
        for copied in report.generations:
            if copied.already_there:
                lines.append(f"step {copied.step}  there already, verified  {copied.name}")
            else:
                there = f" ({format_bytes(copied.present)} were there)" if copied.present else ""
                lines.append(f"step {copied.step}  copied {format_bytes(copied.bytes)}{there}  {copied.name}")
        newest = report.generations[-1].step
        if report.newest != newest:
            lines.append(f"a restore from {target} takes step {report.newest}, which is newer there")
        return "\n".join(lines)

    session.emit(document, text)
