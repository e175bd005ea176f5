"""Runs of a fake job under the real supervisor: real processes, signals and files, no torch."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serai.run.console import Console
from serai.run.services import SavedStep, Services
from serai.run.supervisor import supervise
from serai.run.workspace import Run, Workspace

HERE = Path(__file__).parent
FAKE_LAUNCHER = (sys.executable, str(HERE / "fake_launcher.py"))
FAKE_WORKER = HERE / "fake_worker.py"


class Recorder:
    """A console that remembers."""

    live_interval = 0.0

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.lives: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def live(self, text: str) -> None:
        self.lives.append(text)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def newest_fake_checkpoint(root: str) -> SavedStep | None:
    return None


def fake_services(**changes: Any) -> Services:
    return Services(
        **{
            "launcher": FAKE_LAUNCHER,
            "prepare": lambda job, run, say: {},
            "start_agent": lambda root: None,
            "newest_checkpoint": newest_fake_checkpoint,
            **changes,
        }
    )


def document(name: str, *args: str, processes: int = 2, **sections: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "serai": 1,
        "name": name,
        "script": sections.pop("script", str(FAKE_WORKER)),
        "args": list(args),
        "resources": {"processes": processes, **sections.pop("resources", {})},
        "retry": {"max": 3, "backoff_s": 0.0, **sections.pop("retry", {})},
        **sections,
    }


def wait_for(condition: Callable[[], Any], *, what: str, seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return found


def last_step(run: Run) -> int:
    return max((event["step"] for event in run.steps()), default=0)


class Jobs:
    """Makes and supervises fake jobs in one workspace."""

    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace(folder)
        self.console = Recorder()
        self.started: list[subprocess.Popen[str]] = []

    def make(self, *args: str, name: str = "demo", **sections: Any) -> Run:
        return self.workspace.create(name, spec_text="serai: 1\n", resolved=document(name, *args, **sections))

    def supervise(self, run: Run, *, console: Console | None = None, **services: Any) -> int:
        return supervise(run, console=console or self.console, services=fake_services(**services))

    def start(self, run: Run) -> subprocess.Popen[str]:
        """Supervise in a process of its own, as the command line does."""
        process = subprocess.Popen(
            [sys.executable, str(HERE / "supervise.py"), str(run.path)],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()
