"""``serai ckpt head``: where the newest checkpoint that verifies lies, as one plain line for scripts."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from serai.cli.ckpt_common import (
    Progress,
    Step,
    Target,
    checkpoint_root,
    generation_document,
    plain_place,
)
from serai.cli.session import Session, command

__all__ = ["Field", "main"]


class Field(StrEnum):
    """What to print."""

    PATH = "path"
    STEP = "step"
    NAME = "name"


@command
def main(
    session: Session,
    target: Target = "@last",
    step: Step = None,
    field: Annotated[Field, typer.Option("--print", help="What to print.")] = Field.PATH,
) -> None:
    """Print the place of the newest checkpoint that verifies."""
    from serai.checkpoint.retention import head

    root = checkpoint_root(session, target)
    with Progress(session, "verified") as progress:
        found = head(root, step=step, progress=progress)
    for reason in found.passed_over:
        session.note(f"passed over: {reason}")
    generation = found.generation
    path = plain_place(generation.url)
    document = {
        **generation_document(generation),
        "path": path,
        "passed_over": list(found.passed_over),
    }
    text = {Field.PATH: path, Field.STEP: str(generation.step), Field.NAME: generation.name}[field]
    session.emit(document, lambda: text)
