"""The supervisor stays light: whatever it borrows from other rooms, torch is never among it."""

from __future__ import annotations

import subprocess
import sys

MODULES = (
    "serai.run.supervisor",
    "serai.run.control",
    "serai.run.drill",
    "serai.run.report_html",
    "serai.run.backends.local",
    "serai.data.prepare",
    "serai.checkpoint.agent.client",
    "serai.checkpoint.catalog",
)


def test_the_supervisor_never_imports_torch() -> None:
    program = f"import sys\nfor name in {MODULES!r}: __import__(name)\nprint('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"
