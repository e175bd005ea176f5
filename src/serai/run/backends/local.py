"""This machine: the supervisor as a detached process."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from serai.errors import EnvironmentFault
from serai.run.backends.base import Backend, BackendStatus, Submission
from serai.run.control import stop
from serai.run.job import Job, launch_request
from serai.run.workspace import Run

__all__ = ["LocalBackend"]

_START_S = 20.0


class LocalBackend(Backend):
    """Runs on this machine. ``serai run`` supervises in the foreground; ``submit`` does it in the background."""

    name = "local"

    def render(self, job: Job, run_dir: Path, *, attempt: int = 1) -> str:
        request = launch_request(job, run_dir, attempt=attempt, run_id=f"{run_dir.name}-{attempt}")
        return "\n".join(
            [
                f"# supervisor, on this machine, in {Path.cwd()}",
                shlex.join(self._command(run_dir)),
                f"# its request to the launcher (torch.distributed.elastic), for attempt {attempt}",
                json.dumps(asdict(request), indent=2),
            ]
        )

    def submit(self, run: Run) -> Submission:
        with open(run.path / "supervisor.log", "ab") as log:
            process = subprocess.Popen(
                self._command(run.path),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            holder = run.holder()
            if holder is not None and holder.pid == process.pid:
                break
            code = process.poll()
            if code is not None:
                if code == 0:
                    break
                raise EnvironmentFault(
                    f"the supervisor of {run.name} ended at once (exit code {code})",
                    code="S534",
                    where=str(run.path / "supervisor.log"),
                    expected="a supervisor that holds the run's lock",
                    next_step=f"cat {shlex.quote(str(run.path / 'supervisor.log'))}",
                )
            time.sleep(0.02)
        process.returncode = (
            process.returncode if process.returncode is not None else 0
        )  # it is on its own from here
        return Submission(backend=self.name, handle=str(process.pid))

    def status(self, run: Run) -> BackendStatus:
        state = run.state()
        return BackendStatus(
            alive=run.holder() is not None, status=str(state["status"]), exit_code=state.get("exit_code")
        )

    def cancel(self, run: Run) -> str:
        return stop(run).message

    @staticmethod
    def _command(run_dir: Path) -> list[str]:
        return [sys.executable, "-m", "serai.run", str(run_dir)]
