"""``serai drill``: rehearse failures before they happen."""

from __future__ import annotations

from serai.cli.options import JobFile, Overrides
from serai.cli.session import Session, command

__all__ = ["main"]


@command
def main(
    session: Session,
    job: JobFile = "job.yaml",
    overrides: Overrides = None,
) -> int:
    """Run a job untouched and again with kills; compare the losses."""
    from serai.run.console import PlainConsole, SilentConsole
    from serai.run.drill import drill
    from serai.run.workspace import Workspace
    from serai.spec.resolve import resolve

    spec = resolve(job, overrides or ())
    console = SilentConsole() if session.json or session.quiet else PlainConsole()
    report = drill(spec, Workspace(session.workspace), console=console)
    code = 0 if report.identical else 1
    session.emit({**report.to_json(), "exit_code": code}, report.text)
    return code
