"""``python -m serai.run RUN_DIR``: supervise a run whose folder is made; what back ends and the drill start."""

from __future__ import annotations

import sys
from pathlib import Path

from serai.errors import SeraiError
from serai.run.console import PlainConsole
from serai.run.supervisor import supervise
from serai.run.workspace import Run


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m serai.run RUN_DIR", file=sys.stderr)
        return 2
    try:
        return supervise(Run(Path(arguments[0]).absolute()), console=PlainConsole())
    except SeraiError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
