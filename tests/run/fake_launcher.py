"""Speaks the launcher's protocol without torch: same shim, same variables, same order of reports.

What elastic does is kept: the first failure ends the group (SIGTERM, then SIGKILL). That the real launcher
behaves so is tested in test_launcher_integration.py.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import serai.run

SHIM = Path(serai.run.__file__).with_name("worker_shim.py")


def send(descriptor: int, kind: str, **fields: object) -> None:
    os.write(descriptor, json.dumps({"kind": kind, "time": time.time(), **fields}).encode() + b"\n")


def main() -> None:
    status = os.dup(1)
    os.dup2(2, 1)
    send(status, "ready")
    line = sys.stdin.buffer.raw.readline()
    if not line:
        return
    request = json.loads(line)
    workers: dict[int, subprocess.Popen[bytes]] = {}

    def watch() -> None:
        while os.read(0, 4096):
            pass
        for worker in workers.values():
            os.killpg(worker.pid, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if "crash-launcher" in request["command"]:
        os._exit(7)
    for rank in range(request["processes"]):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(request["processes"])}
        log = str(Path(request["log_dir"]) / "rank-{rank}.log")
        workers[rank] = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SHIM), log, str(os.getpid()), *request["command"]],
            env={**os.environ, **request["environment"], **variables},
            cwd=request["working_folder"],
            start_new_session=True,
        )
    send(status, "started", pids={rank: worker.pid for rank, worker in workers.items()})
    reported: set[int] = set()

    def report(*, first: bool) -> bool:
        failed = False
        for rank, worker in workers.items():
            code = worker.poll()
            if code is not None and rank not in reported:
                reported.add(rank)
                failed = failed or code != 0
                send(status, "exit", rank=rank, code=code, first=first)
        return failed

    while len(reported) < len(workers) and not report(first=True):
        time.sleep(0.02)
    deadline = time.monotonic() + request["shutdown_timeout_s"]
    for worker in workers.values():
        if worker.poll() is None:
            worker.send_signal(signal.SIGTERM)
    for worker in workers.values():
        try:
            worker.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
    report(first=False)


main()
