"""``serai ps``: the runs of the workspace."""

from __future__ import annotations

from serai.cli.session import Session, command

__all__ = ["main"]


@command
def main(session: Session) -> None:
    """List the runs of the workspace, newest first."""
    from serai.cli.runs import age, run_line, table
    from serai.run.workspace import Workspace

    lines = [run_line(run) for run in Workspace(session.workspace).runs()]
    if session.json:
        session.emit_lines(lines)
        return
    if not lines:
        return
    rows = []
    for line in lines:
        total = f"/{line['total_steps']}" if line["total_steps"] else ""
        rows.append(
            [
                line["name"],
                line["id"],
                line["status"],
                "-" if line["step"] is None else f"{line['step']}{total}",
                f"{line['loss']:.4f}" if isinstance(line["loss"], float) else "-",
                age(line["created"]),
            ]
        )
    session.print(table(["NAME", "ID", "STATUS", "STEP", "LOSS", "CREATED"], rows, right={3, 4}))
