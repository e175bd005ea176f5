"""``python -m serai.run`` with the fake launcher in place of elastic."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.run.support import fake_services

from serai.errors import SeraiError
from serai.run.console import PlainConsole
from serai.run.supervisor import supervise
from serai.run.workspace import Run

try:
    sys.exit(supervise(Run(Path(sys.argv[1])), console=PlainConsole(), services=fake_services()))
except SeraiError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
