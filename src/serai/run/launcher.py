"""The launcher: a child process that runs one attempt through ``torch.distributed.elastic``.

A process of its own, because elastic imports torch (seconds, hundreds of MiB) and owns signal handlers and
threads; the supervisor stays light and survives whatever happens here. Elastic's own restart is not used
(``max_restarts=0``): in torch 2.13 restarted workers meet stale gloo addresses in the shared store, and an
attempt that is a fresh process with a fresh rendezvous cannot.

Protocol: the supervisor writes one JSON request line to stdin, and the end of stdin means that the supervisor
is gone. JSON lines go back over stdout: ``ready``, ``started`` {pids}, ``exit`` {rank, code,
first: whether it ended by itself}, ``failed`` {message}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from serai.run.launcher_request import LaunchRequest

__all__ = ["main"]


class _Status:
    """The line to the supervisor. Workers and stray prints get the log instead of stdout."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.set_inheritable(self._fd, False)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def send(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "time": time.time(), **fields}).encode() + b"\n"
        with self._lock:
            try:
                os.write(self._fd, line)
            except BrokenPipeError:
                pass


class _Watchdog:
    """Kills the workers and this process when stdin ends: the portable half of dying with the supervisor."""

    def __init__(self) -> None:
        self.sessions: list[int] = []

    def watch(self) -> None:
        while os.read(0, 4096):
            pass
        for session in self.sessions:
            try:
                os.killpg(session, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        os._exit(1)


def _run(request: LaunchRequest, status: _Status, watchdog: _Watchdog) -> None:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    reported: set[int] = set()

    class Logs(DefaultLogsSpecs):
        """torchrun's error files, at a place where people find them."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            files = {
                rank: str(Path(request.log_dir) / f"rank-{int(env['RANK']):05d}.error.json")
                for rank, env in envs.items()
            }
            for rank, env in envs.items():
                env["TORCHELASTIC_ERROR_FILE"] = files[rank]
            empty = dict.fromkeys(envs, "")
            return LogsDest(
                stdouts=empty,
                stderrs=dict(empty),
                error_files=files,
                filtered_stdout=os.devnull,
                filtered_stderr=os.devnull,
            )

    class Agent(LocalElasticAgent):
        """Tells the supervisor who was started, and how each of them ended."""

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            pids: dict[int, Any] = super()._start_workers(worker_group)
            watchdog.sessions = list(pids.values())
            ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
            status.send("started", pids={ranks[local]: pid for local, pid in pids.items()})
            return pids

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            # Reported before elastic acts on them: what ends from here on was ended by elastic, and is no cause.
            self._report(worker_group, first=True)
            result: RunResult = super()._monitor_workers(worker_group)
            self._report(worker_group, first=False)
            return result

        def _report(self, worker_group: WorkerGroup, *, first: bool) -> None:
            if not isinstance(self._pcontext, SubprocessContext):
                return
            ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
            for local, handler in self._pcontext.subprocess_handlers.items():
                code = handler.proc.poll()
                if code is not None and local not in reported:
                    reported.add(local)
                    status.send("exit", rank=ranks[local], code=code, first=first)

    fixed = request.master_port is not None
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend="static" if fixed else "c10d",
            endpoint=f"127.0.0.1:{request.master_port}" if fixed else "localhost:0",
            run_id=request.run_id,
            min_nodes=1,
            max_nodes=1,
            local_addr="127.0.0.1",
            **({"rank": 0, "timeout": 60} if fixed else {"is_host": True}),
        )
    )
    spec = WorkerSpec(
        role="trainer",
        local_world_size=request.processes,
        entrypoint=sys.executable,
        args=(
            "-I",
            "-S",
            str(Path(__file__).with_name("worker_shim.py")),
            str(Path(request.log_dir) / "rank-{rank}.log"),
            str(os.getpid()),
            *(argument.replace("$", "$$") for argument in request.command),
        ),
        rdzv_handler=handler,
        max_restarts=0,
        monitor_interval=0.1,
        master_addr="127.0.0.1" if fixed else None,
        master_port=request.master_port,
        local_addr="127.0.0.1",
    )
    agent = Agent(
        spec=spec,
        logs_specs=Logs(log_dir=request.log_dir),
        exit_barrier_timeout=5,
        shutdown_timeout=request.shutdown_timeout_s,
    )
    try:
        agent.run()
    finally:
        handler.shutdown()


def main() -> int:
    status = _Status()
    import torch.distributed.elastic.agent.server.local_elastic_agent  # noqa: F401  (paid for before the request)

    status.send("ready")
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return 0
        line += chunk
    request = LaunchRequest(**json.loads(line))
    watchdog = _Watchdog()
    threading.Thread(target=watchdog.watch, daemon=True).start()
    os.chdir(request.working_folder)
    os.environ.update(request.environment)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT"
    try:
        _run(request, status, watchdog)
    except Exception as error:
        status.send("failed", message=f"{type(error).__name__}: {error}")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
