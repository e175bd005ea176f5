"""``serai run``: run a job, or go on with it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serai.cli.options import JobFile, Overrides
from serai.cli.session import Session, command

if TYPE_CHECKING:
    from serai.spec.resolve import ResolvedSpec

__all__ = ["main"]


@command
def main(
    session: Session,
    job: JobFile = "job.yaml",
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and say what would be done.")
    ] = False,
    show_request: Annotated[
        bool, typer.Option("--show-request", help="With --dry-run: also print the exact request.")
    ] = False,
    show_config: Annotated[
        bool,
        typer.Option("--show-config", help="Print every value and where it came from, and do nothing else."),
    ] = False,
) -> int:
    """Run a job; running the same name again resumes it."""
    from serai.spec.resolve import resolve

    spec = resolve(job, overrides or ())
    if show_config:
        _show_config(session, spec)
        return 0
    if show_request and not dry_run:
        raise typer.BadParameter("it only goes with --dry-run", param_hint="--show-request")
    if dry_run:
        _dry_run(session, spec, show_request=show_request)
        return 0

    from serai.run.console import PlainConsole, SilentConsole
    from serai.run.supervisor import run
    from serai.run.workspace import Workspace

    workspace = Workspace(session.workspace)
    console = SilentConsole() if session.json or session.quiet else PlainConsole()
    code = run(spec, workspace, console=console)
    if session.quiet and not session.json and code != 0:
        from serai.run.report import collect, summary

        print("\n".join(summary(collect(workspace.find(spec.name)))), file=sys.stderr)
    if session.json:
        session.emit(_result(workspace, spec.name, code), str)
    return code


def _result(workspace: Any, name: str, code: int) -> dict[str, Any]:
    """What ``--json`` says when the run has ended, however it ended."""
    from serai.cli.runs import run_line

    found = workspace.by_name(name)
    state = found.state()
    failure = state.get("failure") if code == 1 else None
    return {
        "run": run_line(found),
        "status": state["status"],
        "exit_code": code,
        "durable_step": state.get("durable_step"),
        "report": str(found.report_json),
        "error": None
        if failure is None
        else {
            "code": failure["code"],
            "kind": failure["cause"],
            "message": f"{failure['words']}: {failure['message']}",
            "where": None if failure["rank"] is None else f"rank {failure['rank']} on {failure['host']}",
            "expected": None,
            "next": failure["advice"],
            "log": failure["log"],
            "traceback": failure["traceback"],
        },
    }


def _show_config(session: Session, spec: ResolvedSpec) -> None:
    from serai.cli.runs import table

    config = [
        {"key": key, "value": entry.value, "layer": entry.layer.value, "where": entry.where or None}
        for key, entry in spec.provenance.items()
    ]

    def text() -> str:
        rows = []
        for key, entry in spec.provenance.items():
            where = f"{entry.layer.value} ({entry.where})" if entry.where else entry.layer.value
            rows.append([key, entry.value, where])
        return table(["KEY", "VALUE", "FROM"], rows)

    session.emit({"config": config}, text)


def _dry_run(session: Session, spec: ResolvedSpec, *, show_request: bool) -> None:
    """Everything that can be known before the first process starts."""
    import shlex
    from pathlib import Path

    from serai.run.job import Job
    from serai.run.workspace import Workspace
    from serai.spec.difference import changed_spec_error, spec_difference
    from serai.spec.document import rows_per_step
    from serai.spec.resolve import load_resolved

    workspace = Workspace(session.workspace)
    existing = workspace.by_name(spec.name)
    document = spec.document
    if existing is not None:
        differences = spec_difference(load_resolved(existing.resolved_path), document)
        grown = [entry for entry in differences if entry.key == "train.steps" and entry.new > entry.old]
        if others := [entry for entry in differences if entry not in grown]:
            raise changed_spec_error(spec.name, others, where=spec.path)
    job = Job.from_document(spec.to_json(), folder=spec.folder)
    run_folder = existing.path if existing is not None else workspace.path / "runs" / f"{spec.name}-<new>"
    plan: dict[str, Any] = {
        "name": spec.name,
        "action": "start" if existing is None else "resume",
        "run": None if existing is None else existing.id,
        "status": None if existing is None else existing.state()["status"],
        "workspace": str(workspace.path),
        "processes": document.resources.processes,
        "device": document.resources.device,
        "command": job.command(Path(run_folder) / "resolved.json"),
        "checkpoints": job.checkpoint_root(run_folder),
        "retries": document.retry.max,
    }
    if document.train is not None and document.data is not None and document.model is not None:
        vocabulary = document.data.tokenizer.vocab_size
        rows = rows_per_step(document) or 0
        plan.update(
            steps=document.train.steps,
            rows_per_step=rows,
            tokens_per_step=rows * document.data.seq_len,
            parameters=document.model.shape().parameters(vocabulary),
            save_every=document.checkpoint.every,
            text=document.data.corpus or list(document.data.text or ()),
        )

    if show_request:
        from serai.run.backends import backend

        attempt = 1 if existing is None else int(existing.state()["attempts"]) + 1
        plan["request"] = backend("local").render(job, Path(run_folder), attempt=attempt)

    def text() -> str:
        rows = [
            (
                "would",
                f"{plan['action']} {spec.name}"
                + (f" ({plan['run']}, {plan['status']})" if plan["run"] else ""),
            )
        ]
        if "steps" in plan:
            rows.append(("model", f"{plan['parameters'] / 1e6:,.1f} M parameters (at a full vocabulary)"))
            chosen = plan["text"] if isinstance(plan["text"], str) else ", ".join(plan["text"])
            rows.append(("text", chosen))
            rows.append(
                (
                    "train",
                    f"{plan['steps']:,} steps of {plan['rows_per_step']} rows, {plan['tokens_per_step']:,} tokens",
                )
            )
            rows.append(("save", f"every {plan['save_every']} steps"))
        rows.append(("processes", f"{plan['processes']} on this node, device {plan['device']}"))
        rows.append(("command", shlex.join(plan["command"])))
        rows.append(("into", plan["workspace"]))
        rows.append(("checkpoints", plan["checkpoints"]))
        rows.append(("relaunches", f"up to {plan['retries']} after failures"))
        lines = [f"{title:<12}{value}" for title, value in rows]
        return "\n".join([*lines, "", plan["request"]] if show_request else lines)

    session.emit({"dry_run": plan}, text)
