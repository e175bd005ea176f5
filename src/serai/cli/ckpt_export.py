"""``serai ckpt export``: a checkpoint as safetensors, as a DCP folder, or as one file of torch.save."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from serai.cli.ckpt_common import Progress, Step, Target, checkpoint_root
from serai.cli.session import Session, command

__all__ = ["To", "main"]


class To(StrEnum):
    """What to write."""

    SAFETENSORS = "safetensors"
    DCP = "dcp"
    TORCH = "torch"


@command
def main(
    session: Session,
    source: Target,
    target: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A new folder; or a new file (*.safetensors, or with --to torch)."
        ),
    ],
    step: Step = None,
    to: Annotated[To, typer.Option("--to", help="The format.")] = To.SAFETENSORS,
    keys: Annotated[
        list[str] | None,
        typer.Option(
            "--keys",
            metavar="NAME",
            help="Only what is below this name; one alone loses its prefix. May be repeated.",
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", metavar="SIZE", help="Shards of at most this size, such as 5GB."),
    ] = None,
) -> None:
    """Write a checkpoint for others: safetensors (Hugging Face names), DCP or torch.save."""
    from serai.checkpoint.exporting import export
    from serai.errors import SpecError
    from serai.units import format_bytes, parse_bytes

    limit = None
    if max_shard_size is not None:
        try:
            limit = parse_bytes(max_shard_size)
        except ValueError as error:
            raise SpecError(
                f"--max-shard-size: {error}", code="S150", where="serai ckpt export", expected="5GB, 500MiB"
            ) from error
        if limit < 1:
            raise SpecError("--max-shard-size must be positive", code="S150", where="serai ckpt export")
    root = checkpoint_root(session, source)
    with Progress(session, "exported") as progress:
        report = export(
            root, target, step=step, keys=keys, to=to.value, max_shard_bytes=limit, progress=progress
        )
    document = {
        "root": root,
        "step": report.step,
        "generation": report.generation,
        "format": report.format,
        "target": report.target,
        "files": list(report.files),
        "tensors": report.tensors,
        "bytes": report.bytes,
        "shared": report.shared,
        "left_out": list(report.left_out),
    }

    def text() -> str:
        lines = [
            f"step {report.step}: {report.tensors} tensors, {format_bytes(report.bytes)}, as {report.format} "
            f"in {report.target}"
        ]
        if len(report.files) > 1:
            lines += [f"  {file}" for file in report.files]
        lines += [f"tied, stored once: {alias} = {name}" for alias, name in report.shared.items()]
        return "\n".join(lines)

    session.emit(document, text)
    if report.left_out:
        session.note(f"left out, since safetensors hold tensors only: {', '.join(report.left_out)}")
