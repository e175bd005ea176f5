"""``serai ckpt pin`` and ``unpin``: keep a checkpoint whatever retention says."""

from __future__ import annotations

from typing import Annotated

import typer

from serai.cli.ckpt_common import Step, Target, checkpoint_root, generation_document
from serai.cli.session import Session, command

__all__ = ["pin", "unpin"]


@command
def pin(
    session: Session,
    target: Target = "@last",
    step: Step = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Stored with the pin.")] = "",
) -> None:
    """Keep a checkpoint whatever retention says."""
    from serai.checkpoint.retention import pin as pin_it

    generation, changed = pin_it(checkpoint_root(session, target), step=step, reason=reason)
    session.emit(
        {**generation_document(generation), "pinned": True, "changed": changed},
        lambda: f"{generation.name} is pinned" + ("" if changed else " (it was already)"),
    )


@command
def unpin(session: Session, target: Target = "@last", step: Step = None) -> None:
    """Let retention decide again."""
    from serai.checkpoint.retention import unpin as unpin_it

    generation, changed = unpin_it(checkpoint_root(session, target), step=step)
    session.emit(
        {**generation_document(generation), "pinned": False, "changed": changed},
        lambda: f"{generation.name} is no longer pinned" if changed else f"{generation.name} was not pinned",
    )
