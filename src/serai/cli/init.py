"""``serai init``: a folder with everything to start from."""

from __future__ import annotations

from typing import Annotated

import typer

from serai.cli.session import Session, command

__all__ = ["main"]


@command
def main(
    session: Session,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Folder to make; its last part names the runs.")
    ],
) -> None:
    """Make a folder with a job file and a training script to start from."""
    import shlex

    from serai.spec.starter import create

    created = create(name)
    folder = shlex.quote(str(created.folder))
    following = [f"cd {folder}", "serai run job.yaml", "serai drill job.yaml"]

    def text() -> str:
        lines = [f"made {created.folder}"]
        width = max(len(file) for file in created.files)
        lines += [f"  {file:<{width}}  {purpose}" for file, purpose in created.files.items()]
        lines += [f"{'next' if index == 0 else '':<6}{line}" for index, line in enumerate(following)]
        return "\n".join(lines)

    session.emit({"folder": str(created.folder), "files": list(created.files), "next": following}, text)
