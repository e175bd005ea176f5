"""``serai ckpt prune``: remove old checkpoints by the rules of ``Keep``; a dry run without ``--yes``."""

from __future__ import annotations

from typing import Annotated

import typer

from serai.cli.ckpt_common import Progress, Target, checkpoint_root, generation_document
from serai.cli.session import Session, command

__all__ = ["main"]


@command
def main(
    session: Session,
    target: Target = "@last",
    last: Annotated[int, typer.Option("--keep-last", metavar="N", min=1, help="Keep the newest N.")] = 2,
    every: Annotated[
        int | None,
        typer.Option("--keep-every", metavar="N", min=1, help="Keep those whose step is a multiple of N."),
    ] = None,
    best: Annotated[
        str | None,
        typer.Option(
            "--keep-best", metavar="METRIC", help="Keep the best: loss (smallest) or max:accuracy (largest)."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it nothing is removed.")] = False,
) -> None:
    """Remove old checkpoints; only says which ones without --yes. Pinned ones stay."""
    from serai.checkpoint.policy import Keep
    from serai.checkpoint.retention import prune
    from serai.units import format_bytes

    root = checkpoint_root(session, target)
    with Progress(session, "verified") as progress:
        report = prune(root, Keep(last=last, every=every, best=best), dry_run=not yes, progress=progress)
    document = {
        "root": root,
        "dry_run": report.dry_run,
        "removed": [generation_document(generation) for generation in report.removed],
        "kept": [generation_document(generation) for generation in report.kept],
        "unfinished": list(report.unfinished),
        "bytes": report.bytes,
    }

    def text() -> str:
        verb = "would remove" if report.dry_run else "removed"
        lines = [f"{verb} {g.name}  {format_bytes(g.bytes)}" for g in report.removed]
        lines += [f"{verb} {name}  (never finished)" for name in report.unfinished]
        lines += [f"kept {g.name}" for g in report.kept]
        lines.append(f"{verb} {len(report.removed)} checkpoints, {format_bytes(report.bytes)}")
        if report.dry_run and (report.removed or report.unfinished):
            lines.append("nothing was removed: add --yes")
        return "\n".join(lines)

    session.emit(document, text)
