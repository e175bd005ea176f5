"""``serai show``: one run, whole."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from serai.cli.runs import complete_run
from serai.cli.session import Session, command

__all__ = ["main"]


@command
def main(
    session: Session,
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="Name, id prefix or @last.", autocompletion=complete_run)
    ] = "@last",
) -> None:
    """Show one run: status, loss, checkpoints, resumes, what to do next."""
    from serai.cli.runs import find_run
    from serai.run.report_data import collect

    run = find_run(session, ref)
    report = collect(run)
    document = {
        key: value for key, value in report.items() if key not in ("schema_version", "steps", "spec_text")
    }
    document["next"] = _next_commands(report)
    document["logs"] = str(run.path / "logs")
    session.emit(document, lambda: _text(session, report, document["next"]))


def _text(session: Session, report: dict[str, Any], following: list[str]) -> str:
    from serai.cli.runs import age, seconds_text
    from serai.units import format_bytes

    run, progress = report["run"], report["progress"]
    status = session.style(run["status"], {"finished": "green", "failed": "red"}.get(run["status"], "yellow"))
    rows: list[tuple[str, str]] = [
        ("status", f"{status}, exit code {run['exit_code']}" if run["exit_code"] is not None else status)
    ]
    if run["note"]:
        rows.append(("note", run["note"]))
    total = f" of {progress['total_steps']}" if progress["total_steps"] else ""
    rows.append(("step", "none yet" if progress["last_step"] is None else f"{progress['last_step']}{total}"))
    if isinstance(progress["final_loss"], float):
        rows.append(("loss", f"{progress['final_loss']:.4f}"))
    if isinstance(progress["validation_loss"], float):
        beside = progress["unigram_entropy"]
        shown = f"{progress['validation_loss']:.4f}"
        rows.append(
            ("validation", f"{shown} (unigram entropy {beside:.4f})" if isinstance(beside, float) else shown)
        )
    if progress["tokens_per_s"]:
        rows.append(("speed", f"{progress['tokens_per_s']:,.0f} tokens/s"))
    rows.append(
        ("time", f"{seconds_text(run['seconds'])} at work, created {age(run['created'])} on {run['host']}")
    )
    durable = progress["last_durable_step"]
    saves = report["checkpoints"]
    saved = f"{len(saves)} saves" if saves else "no save yet"
    if saves:
        saved += f", {format_bytes(saves[-1]['bytes'])} each"
    rows.append(("checkpoints", saved + (f", newest durable: step {durable}" if durable is not None else "")))
    rows += [(f"attempt {entry['attempt']}", _attempt_text(entry)) for entry in report["attempts"]]
    failure = report["failure"]
    if failure is not None:
        rank = "" if failure["rank"] is None else f", rank {failure['rank']} on {failure['host']}"
        rows.append(
            (
                "failure",
                f"[{failure['code']}] {failure['words']} ({failure['cause']}){rank}: {failure['message']}",
            )
        )
        if failure["log"]:
            rows.append(("log", failure["log"]))
    rows.append(("folder", run["path"]))
    width = max(len(title) for title, _ in rows)
    lines = [f"{session.style(run['name'], 'bold')} ({run['id']})"]
    lines += [f"  {title:<{width}}  {text}" for title, text in rows]
    lines += [f"  {'next' if index == 0 else '':<{width}}  {line}" for index, line in enumerate(following)]
    return "\n".join(lines)


def _attempt_text(entry: dict[str, Any]) -> str:
    from serai.cli.runs import seconds_text

    restored = entry["restored_step"]
    begin = "from the start" if restored is None else f"resumed from step {restored} ({entry['tier']})"
    if restored is not None and entry["restore_s"] is not None:
        begin += f" in {seconds_text(entry['restore_s'])}"
    end = entry["status"] if entry["ended"] is not None else "under way"
    last = f" at step {entry['last_step']}" if entry["last_step"] is not None else ""
    cause = f" ({entry['cause']})" if entry["cause"] else ""
    return f"{begin}, {end}{last}{cause}"


def _next_commands(report: dict[str, Any]) -> list[str]:
    run = report["run"]
    name = run["name"]
    if run["status"] in ("preparing", "running", "stopping"):
        return [f"serai logs {name} -f", f"serai stop {name}"]
    commands = [] if run["status"] == "finished" else [f"{run['command']}   (resumes)"]
    commands.append(f"serai logs {name}")
    if report["checkpoints"]:
        commands += [f"serai ckpt ls {name}", f"serai ckpt verify {name}"]
    if report["failure"] is not None:
        commands.append(f"serai explain {report['failure']['code']}")
    return commands
