"""The ``jobs`` fixture, which also holds that no process outlives its run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.run.support import Jobs

from serai.run.processes import leftovers


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    found = Jobs(tmp_path / "workspace")
    yield found
    found.close()
    for run in found.workspace.runs():
        deadline = time.monotonic() + 5
        while left := leftovers(run.path):
            if time.monotonic() > deadline:
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                pytest.fail(f"processes outlive the run {run.id}: {left}")
            time.sleep(0.02)
