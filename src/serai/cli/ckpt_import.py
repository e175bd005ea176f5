"""``serai ckpt import``: make a checkpoint from what others wrote."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from serai.cli.ckpt_common import Progress, Target, checkpoint_root
from serai.cli.session import Session, command

__all__ = ["From", "main"]


class From(StrEnum):
    """What the source is."""

    SAFETENSORS = "safetensors"
    DCP = "dcp"
    TORCH = "torch"
    DEEPSPEED = "deepspeed"


@command
def main(
    session: Session,
    source: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="*.safetensors or a folder of them, a DCP folder, a torch.save file, or a DeepSpeed universal "
            "folder.",
        ),
    ],
    target: Target,
    step: Annotated[int, typer.Option("--step", metavar="N", min=0, help="The step to resume from.")] = 0,
    kind: Annotated[
        From | None, typer.Option("--from", help="What the source is; told by what is in it if not given.")
    ] = None,
    name: Annotated[
        str, typer.Option("--as", metavar="NAME", help="The name in state of a bare state dict.")
    ] = "model",
    rename: Annotated[
        list[str] | None,
        typer.Option("--rename", metavar="OLD=NEW", help="Another top-level name; may be repeated."),
    ] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option("--keys", metavar="NAME", help="Only this top-level name; may be repeated."),
    ] = None,
) -> None:
    """Make a checkpoint from safetensors, DCP, torch.save or DeepSpeed universal; runs resume from it."""
    import os

    from serai.checkpoint.importing import import_checkpoint
    from serai.errors import SpecError
    from serai.units import format_bytes

    names = {}
    for pair in rename or []:
        old, found, new = pair.partition("=")
        if not (old and found and new):
            raise SpecError(
                f"--rename {pair}",
                code="S150",
                where="serai ckpt import",
                expected="OLD=NEW, as in state_dict=model",
            )
        names[old] = new
    is_new = os.sep in target and "://" not in target and not os.path.exists(target)
    root = os.path.abspath(target) if is_new else checkpoint_root(session, target)
    with Progress(session, "imported") as progress:
        report = import_checkpoint(
            source,
            root,
            step=step,
            kind=None if kind is None else kind.value,
            name=name,
            rename=names,
            keys=keys,
            progress=progress,
        )
    document = {
        "source": report.source,
        "format": report.format,
        "root": report.root,
        "generation": report.generation,
        "step": report.step,
        "names": list(report.names),
        "tensors": report.tensors,
        "bytes": report.bytes,
        "notes": list(report.notes),
    }
    session.emit(
        document,
        lambda: (
            f"step {report.step}: {report.tensors} tensors, {format_bytes(report.bytes)}, as "
            f"{', '.join(report.names)} in {report.generation}"
        ),
    )
    for note in report.notes:
        session.note(f"note: {note}")
