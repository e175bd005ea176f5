"""``serai ckpt``: the checkpoints of a run, or of any root."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer

from serai.cli.group import Command, Group
from serai.cli.runs import complete_run
from serai.cli.session import Session, command

__all__ = ["app"]

app = typer.Typer(cls=Group, help="List, show and verify checkpoints.", rich_markup_mode=None)

_Target = Annotated[
    str,
    typer.Argument(
        metavar="REF|ROOT",
        help="A run (name, id prefix, @last), a folder or a storage URL.",
        autocompletion=complete_run,
    ),
]
_Step = Annotated[
    int | None,
    typer.Option("--step", metavar="N", help="The checkpoint of this step; the newest if not given."),
]


@app.callback(invoke_without_command=True)
@command
def _group(session: Session) -> None:
    """List, show and verify checkpoints."""
    if session.context.invoked_subcommand is None:
        if session.json:
            from serai.errors import SpecError

            raise SpecError(
                "no command was given", code="S150", where="serai ckpt", next_step="serai ckpt --help"
            )
        print(session.context.get_help())


@app.command("ls", cls=Command)
@command
def list_(session: Session, target: _Target = "@last") -> None:
    """List checkpoints, newest first."""
    from serai.checkpoint.catalog import generations
    from serai.cli.runs import age, table
    from serai.units import format_bytes

    root = _root(session, target)
    found = generations(root)
    if session.json:
        session.emit_lines(_generation_document(generation) for generation in found)
        return
    if not found:
        session.note(f"no checkpoint in {root}")
        return
    rows = [
        [
            str(generation.step),
            age(generation.created),
            format_bytes(generation.bytes),
            str(generation.world),
            " ".join(f"{name}={value:.4g}" for name, value in generation.metrics.items()),
            generation.name,
        ]
        for generation in found
    ]
    session.print(table(["STEP", "SAVED", "SIZE", "RANKS", "METRICS", "GENERATION"], rows, right={0, 2, 3}))


@app.command("show", cls=Command)
@command
def show(session: Session, target: _Target = "@last", step: _Step = None) -> None:
    """Show one checkpoint: its files and tensors."""
    from serai.checkpoint.catalog import Generation, find
    from serai.cli.runs import table
    from serai.units import format_bytes

    storage, folder, manifest = find(_root(session, target), step)
    generation = Generation.of(manifest, storage, folder)
    tensors: list[dict[str, Any]] = [
        {"name": name, "dtype": str(tensor.dtype.name), "shape": list(tensor.shape), "rank": tensor.rank}
        for name, tensor in sorted(manifest.tensors.items())
    ]
    files: list[dict[str, Any]] = [{"name": file.name, "bytes": file.size} for file in manifest.files]

    def text() -> str:
        rows = [
            ("step", str(generation.step)),
            ("saved", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(generation.created))),
            ("by", f"{generation.world} ranks, attempt {generation.attempt}, save {generation.sequence}"),
            ("size", format_bytes(generation.bytes)),
            ("metrics", ", ".join(f"{name}={value:g}" for name, value in generation.metrics.items()) or "-"),
            ("place", generation.url),
        ]
        lines = [f"{title:<9}{value}" for title, value in rows]
        lines += [
            "",
            table(
                ["FILE", "SIZE"], [[file["name"], format_bytes(file["bytes"])] for file in files], right={1}
            ),
        ]
        cells = [[t["name"], t["dtype"], "×".join(map(str, t["shape"])) or "scalar"] for t in tensors]
        return "\n".join([*lines, "", table(["TENSOR", "DTYPE", "SHAPE"], cells)])

    session.emit({**_generation_document(generation), "files": files, "tensors": tensors}, text)


@app.command("verify", cls=Command)
@command
def verify(session: Session, target: _Target = "@last", step: _Step = None) -> int:
    """Read every byte of every checkpoint and compare it with its checksum; exit 1 if one differs."""
    from serai.checkpoint.catalog import verify as verify_root
    from serai.errors import CheckpointNotFound
    from serai.units import format_bandwidth, format_bytes

    root = _root(session, target)
    began = time.monotonic()
    report = verify_root(root, step=step)
    seconds = time.monotonic() - began
    if not report.generations:
        raise CheckpointNotFound(
            f"there is no {'checkpoint' if step is None else f'checkpoint of step {step}'} in {root}",
            where=root,
            expected="at least one committed checkpoint",
            next_step=f"serai ckpt ls {target}",
        )
    read = sum(generation.bytes for generation in report.generations)
    document = {
        "root": root,
        "ok": report.ok,
        "bytes": read,
        "seconds": seconds,
        "generations": [
            {
                "name": generation.name,
                "step": generation.step,
                "bytes": generation.bytes,
                "ok": generation.ok,
                "damage": [_damage_document(damage) for damage in generation.damage],
            }
            for generation in report.generations
        ],
        "exit_code": 0 if report.ok else 1,
    }

    def text() -> str:
        lines = []
        for generation in report.generations:
            verdict = session.style("ok", "green") if generation.ok else session.style("DAMAGED", "red")
            where = "?" if generation.step is None else str(generation.step)
            lines.append(f"step {where}  {format_bytes(generation.bytes)}  {verdict}  {generation.name}")
            lines += [f"  {damage}" for damage in generation.damage]
        speed = format_bandwidth(read / seconds) if seconds > 0 else "-"
        lines.append(
            f"{len(report.generations)} checkpoints, {format_bytes(read)} read and compared at {speed}"
        )
        return "\n".join(lines)

    session.emit(document, text)
    return 0 if report.ok else 1


def _root(session: Session, target: str) -> str:
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


def _generation_document(generation: Any) -> dict[str, Any]:
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


def _damage_document(damage: Any) -> dict[str, Any]:
    return {
        "generation": damage.generation,
        "file": damage.file,
        "offset": damage.offset,
        "reason": damage.reason,
        "tensors": list(damage.tensors),
    }
