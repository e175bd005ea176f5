"""What the supervisor borrows: preparation in a child that tells, fails with its own error, and can be stopped."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from serai.data.prepare import Prepared
from serai.errors import SpecError
from serai.run.job import Job
from serai.run.processes import leftovers
from serai.run.services import default_services
from serai.run.stopping import StopRequested, StopRequests
from serai.run.workspace import Run, Workspace


def make(folder: Path, text: str, documents: int) -> tuple[Job, Run]:
    (folder / "text").mkdir()
    for number in range(documents):
        (folder / "text" / f"{number}.txt").write_text(f"{number} {text}")
    resolved = {
        "name": "demo",
        "data": {"text": ["text"], "seq_len": 16, "tokenizer": {"vocab_size": 300}},
        "train": {"steps": 4, "seed": 3},
    }
    run = Workspace(folder / "ws").create("demo", spec_text="", resolved=resolved)
    return Job.from_document(resolved, folder=folder), run


def test_preparation_leaves_what_workers_read(tmp_path: Path) -> None:
    job, run = make(tmp_path, "the inn on the road is safe and goes on in the morning " * 40, 8)
    said: list[str] = []
    fields = default_services().prepare(job, run, said.append)
    prepared = Prepared.load(run.path / "prepared.json")
    assert fields["train_tokens"] == prepared.train_tokens > 0
    assert str(prepared.manifest).startswith(str(run.cache.resolve()))
    assert any("tokenizer" in line for line in said)
    assert default_services().prepare(job, run, said.append)["reused"] is True


def test_its_error_is_the_same_error_here(tmp_path: Path) -> None:
    job, run = make(tmp_path, "too little", 2)
    with pytest.raises(SpecError) as caught:
        default_services().prepare(job, run, lambda line: None)
    assert caught.value.code.startswith("S1")
    assert caught.value.exit_code == 2
    assert caught.value.next_step


def test_a_stop_request_ends_it(tmp_path: Path) -> None:
    job, run = make(tmp_path, " ".join(str(number * 7919) for number in range(40_000)), 12)
    timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGTERM))
    began = time.monotonic()

    def prepare_for_ever() -> None:
        while True:
            default_services().prepare(job, run, lambda line: None)

    with StopRequests(run.stop_path) as stops:
        timer.start()
        with pytest.raises(StopRequested), stops.interruptible():
            prepare_for_ever()
    timer.join()
    assert time.monotonic() - began < 20
    assert leftovers(run.path) == []
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _prepares(pid, run)]


def _prepares(pid: str, run: Run) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return False
    return "serai.data.prepare" in command and json.dumps(str(run.path))[1:-1] in command
