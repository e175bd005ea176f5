"""The parts of a resolved job that supervision reads, each as its own room's config."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serai.checkpoint.config import CheckpointConfig
from serai.context import RunContext
from serai.data.config import DataConfig
from serai.errors import SpecError
from serai.run.config import ResourcesConfig, RetryConfig
from serai.run.launcher_request import LaunchRequest
from serai.run.workspace import Run

__all__ = ["Job", "launch_request", "worker_threads"]


@dataclass(frozen=True)
class Job:
    """A resolved job as the supervisor needs it.

    Attributes:
        folder: folder of the job file; scripts and relative paths start there.
        steps: optimizer steps of a native job; ``None`` for a script.
        data: what to prepare; ``None`` for a script.
        script: the user's own training script, absolute; ``None`` for a native job.
    """

    name: str
    folder: Path
    resources: ResourcesConfig
    retry: RetryConfig
    checkpoint: CheckpointConfig
    steps: int | None
    seed: int
    data: DataConfig | None
    script: Path | None
    args: tuple[str, ...]

    @classmethod
    def from_document(cls, document: Mapping[str, Any], *, folder: Path) -> Job:
        """Read ``resolved.json``, leniently: another version of serai may have written it."""
        train = document.get("train") or {}
        script = document.get("script")
        data = document.get("data")
        return cls(
            name=str(document["name"]),
            folder=folder,
            resources=ResourcesConfig.from_stored(document.get("resources") or {}),
            retry=RetryConfig.from_stored(document.get("retry") or {}),
            checkpoint=CheckpointConfig.from_stored(document.get("checkpoint") or {}),
            steps=int(train["steps"]) if "steps" in train and not script else None,
            seed=int(train.get("seed", 1)),
            data=DataConfig.from_stored(data) if data and not script else None,
            script=(folder / script).resolve() if script else None,
            args=tuple(str(argument) for argument in document.get("args") or ()),
        )

    def checkpoint_root(self, run_dir: Path) -> str:
        """Root URL or absolute folder of the run's checkpoints."""
        root = self.checkpoint.root
        if root is None:
            return str(run_dir / "checkpoints")
        return root if "://" in root else str((self.folder / root).resolve())

    def command(self, resolved: Path) -> list[str]:
        """The worker's command line."""
        if self.script is None:
            return [sys.executable, "-m", "serai.train.worker", str(resolved)]
        return [sys.executable, "-u", str(self.script), *self.args]

    def check_script(self) -> None:
        """Raises ``SpecError`` S522 when the script is not there to be read."""
        if self.script is not None and not os.access(self.script, os.R_OK):
            raise SpecError(
                f"the script {self.script} cannot be read"
                if self.script.exists()
                else f"no script at {self.script}",
                code="S522",
                where="script",
                expected=f"a Python file, relative to {self.folder}",
                next_step=f"ls {shlex.quote(str(self.script.parent))}",
            )


def worker_threads(resources: ResourcesConfig, environ: Mapping[str, str]) -> str:
    """OMP_NUM_THREADS of a worker: the job's, else the user's own setting, else the cores this process may
    use divided by the workers. Without it every worker starts a thread a core and they fight."""
    if resources.threads is not None:
        return str(resources.threads)
    if environ.get("OMP_NUM_THREADS"):
        return environ["OMP_NUM_THREADS"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return str(max(1, cores // resources.processes))


def launch_request(
    job: Job, run_dir: Path, *, attempt: int, run_id: str, shutdown_timeout_s: int = 10
) -> LaunchRequest:
    """What the supervisor asks of the launcher for one attempt of a job in its run's folder."""
    run = Run(run_dir)
    context = RunContext(run_dir=run_dir, attempt=attempt, checkpoints=job.checkpoint_root(run_dir))
    return LaunchRequest(
        command=job.command(run.resolved_path),
        processes=job.resources.processes,
        run_id=run_id,
        log_dir=str(run.log_dir(attempt)),
        working_folder=str(job.folder),
        environment={
            **context.environment(),
            "OMP_NUM_THREADS": worker_threads(job.resources, os.environ),
            "PYTHONUNBUFFERED": "1",
        },
        master_port=job.resources.master_port,
        shutdown_timeout_s=shutdown_timeout_s,
    )
