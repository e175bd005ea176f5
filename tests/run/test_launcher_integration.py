"""The real launcher: torch.distributed.elastic with torchrun's variables, gloo between the workers."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from tests.run.support import Jobs

from serai.run.attempt import LAUNCHER
from serai.run.workspace import Run

HEAD = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
         "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS", "SERAI_ATTEMPT", "SERAI_RUN_DIR")
print(json.dumps({name: os.environ[name] for name in names} | {"cwd": os.getcwd(), "args": sys.argv[1:]}), flush=True)
"""
SCRIPT = (
    HEAD
    + """
import datetime, signal
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
rank, attempt = dist.get_rank(), os.environ["SERAI_ATTEMPT"]
total = torch.tensor([float(rank + 1)])
dist.all_reduce(total)
if rank == 1 and attempt == "1":
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
print("sum", total.item(), flush=True)
if rank == 1:
    raise ValueError("rank one has had enough")
dist.all_reduce(total)
"""
)


def make(jobs: Jobs, tmp_path: Path, script: str, *args: str, **resources: Any) -> Run:
    (tmp_path / "train.py").write_text(script)
    run = jobs.make(*args, resources=resources, script=str(tmp_path / "train.py"))
    run.update(job_folder=str(tmp_path))
    return run


def variables(run: Run, attempt: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run.log_path(attempt, rank).read_text().splitlines()[0])
    return found


def test_a_killed_rank_and_then_an_exception_over_real_elastic(jobs: Jobs, tmp_path: Path) -> None:
    run = make(jobs, tmp_path, SCRIPT, "cost: $5")
    assert jobs.supervise(run, launcher=LAUNCHER) == 1
    ended = [(event["cause"], event["first_failing_rank"]) for event in run.events("attempt_ended")]
    assert ended == [("killed", 1), ("user_error", 1)]
    failure = run.state()["failure"]
    assert failure["message"] == "ValueError: rank one has had enough"
    assert failure["traceback"].splitlines()[0] == "Traceback (most recent call last):"
    for rank in (0, 1):
        first, second = variables(run, 1, rank), variables(run, 2, rank)
        assert (second["RANK"], second["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (second["WORLD_SIZE"], second["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert (first["SERAI_ATTEMPT"], second["SERAI_ATTEMPT"]) == ("1", "2")
        assert second["SERAI_RUN_DIR"] == str(run.path)
        assert second["OMP_NUM_THREADS"]
        assert second["cwd"] == str(tmp_path)
        assert second["args"] == ["cost: $5"]
        assert run.log_path(2, rank).read_text().splitlines()[1] == "sum 6.0"


def test_a_fixed_port(jobs: Jobs, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = make(jobs, tmp_path, HEAD, processes=1, master_port=port)
    assert jobs.supervise(run, launcher=LAUNCHER) == 0
    assert (variables(run, 1, 0)["MASTER_ADDR"], variables(run, 1, 0)["MASTER_PORT"]) == (
        "127.0.0.1",
        str(port),
    )
