"""``serai stop``: ask a run to save and stop."""

from __future__ import annotations

from typing import Annotated

import typer

from serai.cli.runs import complete_run
from serai.cli.session import Session, command

__all__ = ["main"]


@command
def main(
    session: Session,
    ref: Annotated[
        str, typer.Argument(metavar="REF", help="Name, id prefix or @last.", autocompletion=complete_run)
    ],
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait", metavar="SECONDS", min=0.0, help="Wait until it has stopped, at most this long."
        ),
    ] = None,
) -> int:
    """Ask a run to save and stop; `serai run` resumes it."""
    from serai.cli.runs import find_run
    from serai.run.control import StopAnswer, stop

    run = find_run(session, ref)
    result = stop(run, wait=wait)
    document = {
        "run": run.id,
        "answer": result.answer.value,
        "message": result.message,
        "pid": result.pid,
        "host": result.host,
    }
    session.emit(document, lambda: result.message)
    return 1 if wait is not None and result.answer in (StopAnswer.ASKED, StopAnswer.OTHER_HOST) else 0
