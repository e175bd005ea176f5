"""``serai ckpt``: the checkpoints of a run, or of any root."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from serai.cli import ckpt_copy, ckpt_diff, ckpt_export, ckpt_head, ckpt_import, ckpt_pin, ckpt_prune
from serai.cli.ckpt_common import (
    Progress,
    Step,
    Target,
    checkpoint_root,
    damage_document,
    generation_document,
    plain_place,
)
from serai.cli.group import Command, Group
from serai.cli.session import Session, command

__all__ = ["app"]

_History = Annotated[
    bool,
    typer.Option("--history", help="Every checkpoint that was ever committed or removed (local roots)."),
]

app = typer.Typer(
    cls=Group, help="List, verify, compare, copy, convert and prune checkpoints.", rich_markup_mode=None
)


@app.callback(invoke_without_command=True)
@command
def _group(session: Session) -> None:
    """List, verify, compare, copy, convert and prune checkpoints."""
    if session.context.invoked_subcommand is None:
        if session.json:
            from serai.errors import SpecError

            raise SpecError(
                "no command was given", code="S150", where="serai ckpt", next_step="serai ckpt --help"
            )
        print(session.context.get_help())


@app.command("ls", cls=Command)
@command
def list_(session: Session, target: Target = "@last", history: _History = False) -> None:
    """List checkpoints, newest first."""
    from serai.checkpoint.catalog import generations, is_pinned
    from serai.cli.runs import age, table
    from serai.storage.registry import open_storage
    from serai.units import format_bytes

    root = checkpoint_root(session, target)
    if history:
        _list_history(session, root)
        return
    storage = open_storage(root)
    found = generations(storage)
    pinned = {generation.name for generation in found if is_pinned(storage, generation)}
    if session.json:
        session.emit_lines(
            {**generation_document(generation), "pinned": generation.name in pinned} for generation in found
        )
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
            generation.name + (" (pinned)" if generation.name in pinned else ""),
        ]
        for generation in found
    ]
    session.print(table(["STEP", "SAVED", "SIZE", "RANKS", "METRICS", "GENERATION"], rows, right={0, 2, 3}))


def _list_history(session: Session, root: str) -> None:
    """What was committed and removed, newest first, from ``history.jsonl``."""
    from pathlib import Path

    from serai.checkpoint.history import read_history
    from serai.cli.runs import age, table
    from serai.storage.registry import is_local
    from serai.units import format_bytes, format_duration

    if not is_local(root):
        session.note(f"{root} has no history: an object store cannot append to a file")
        return
    lines = sorted(read_history(Path(plain_place(root))), key=lambda line: float(line["time"]), reverse=True)
    if session.json:
        session.emit_lines(lines)
        return
    if not lines:
        session.note(f"no history in {root}")
        return
    rows = [
        [
            str(line.get("step")),
            age(float(line["time"])),
            str(line["event"]),
            format_bytes(float(line.get("bytes") or 0)),
            format_duration(float(line.get("seconds") or 0)) if line["event"] == "committed" else "",
            str(line["name"]),
        ]
        for line in lines
    ]
    session.print(table(["STEP", "WHEN", "EVENT", "SIZE", "TOOK", "GENERATION"], rows, right={0, 3, 4}))


@app.command("show", cls=Command)
@command
def show(session: Session, target: Target = "@last", step: Step = None) -> None:
    """Show one checkpoint: its files and tensors."""
    from serai.checkpoint.catalog import Generation, find
    from serai.cli.runs import table
    from serai.units import format_bytes

    storage, folder, manifest = find(checkpoint_root(session, target), step)
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

    session.emit({**generation_document(generation), "files": files, "tensors": tensors}, text)


@app.command("verify", cls=Command)
@command
def verify(session: Session, target: Target = "@last", step: Step = None) -> int:
    """Read every byte of every checkpoint and compare it with its checksum; exit 1 if one differs."""
    from serai.checkpoint.catalog import verify as verify_root
    from serai.errors import CheckpointNotFound
    from serai.units import format_bandwidth, format_bytes

    root = checkpoint_root(session, target)
    began = time.monotonic()
    with Progress(session, "verified") as progress:
        report = verify_root(root, step=step, progress=progress)
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
                "damage": [damage_document(damage) for damage in generation.damage],
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


for _name, _function in {
    "diff": ckpt_diff.main,
    "copy": ckpt_copy.main,
    "export": ckpt_export.main,
    "import": ckpt_import.main,
    "prune": ckpt_prune.main,
    "pin": ckpt_pin.pin,
    "unpin": ckpt_pin.unpin,
    "head": ckpt_head.main,
}.items():
    app.command(_name, cls=Command)(_function)
