"""The supervisor over real processes: ends, faults, relaunches, stops, and nothing left behind."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.needs import needs_root
from tests.run.support import Jobs, last_step, wait_for

from serai.errors import EnvironmentFault, SeraiError, SpecError
from serai.events import read_events
from serai.run.processes import ProcessIdentity, leftovers
from serai.run.services import SavedStep
from serai.run.workspace import Run


def expected_loss(steps: int) -> float:
    import math

    loss = 5.0
    for step in range(1, steps + 1):
        loss = loss * 0.95 + 0.01 * math.sin(step)
    return loss


def change_args(run: Run, *args: str) -> None:
    run.resolved_path.write_text(json.dumps({**run.resolved(), "args": list(args)}))


def kinds(run: Run) -> list[str]:
    return [event["kind"] for event in run.events()]


def report(run: Run) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run.report_json.read_text())
    return document


def worker_pids(run: Run) -> list[int]:
    started = list(run.events("attempt_started"))
    return list(started[-1]["pids"])


def test_a_job_that_goes_well(jobs: Jobs) -> None:
    run = jobs.make("--steps", "12")
    assert jobs.supervise(run) == 0
    state = run.state()
    assert (state["status"], state["exit_code"], state["attempts"]) == ("finished", 0, 1)
    assert kinds(run) == [
        "run_started", "attempt_started", "worker_exited", "worker_exited", "attempt_ended", "run_ended",
    ]  # fmt: skip
    assert [event["step"] for event in run.steps()] == list(range(1, 13))
    assert run.log_path(1, 1).read_text().startswith("rank 1 of 2, ")
    assert report(run)["progress"]["final_loss"] == expected_loss(12)
    assert "demo finished · step 12" in jobs.console.text
    assert any("no durable checkpoint yet" in line or "durable: step" in line for line in jobs.console.lives)


def test_a_killed_rank_is_relaunched_and_the_loss_is_the_same(jobs: Jobs) -> None:
    run = jobs.make("--steps", "20", "--fault", "SIGKILL", "--fault-rank", "1", "--fault-step", "13")
    assert jobs.supervise(run) == 0
    ended = list(run.events("attempt_ended"))
    assert [(event["cause"], event["first_failing_rank"]) for event in ended] == [("killed", 1), (None, None)]
    (relaunch,) = run.events("relaunch")
    assert relaunch["resume_step"] >= 10
    assert report(run)["progress"]["final_loss"] == expected_loss(20)
    assert run.state()["attempts"] == 2


@pytest.mark.parametrize(
    ("fault", "cause", "message"),
    [
        ("user", "user_error", "ValueError: the labels are wrong"),
        ("named-nan", "not_a_number", "loss is nan at step 7"),
        ("disk", "disk_full", "OSError: [Errno 28] No space left on device"),
        ("memory", "out_of_memory", "MemoryError: cannot allocate 8 GiB"),
        ("spec", "spec_error", "exit code 2"),
    ],
)
def test_what_a_relaunch_cannot_help_is_not_relaunched(
    jobs: Jobs, fault: str, cause: str, message: str
) -> None:
    run = jobs.make("--fault", fault, "--fault-rank", "1")
    assert jobs.supervise(run) == 1
    state = run.state()
    assert (state["status"], state["attempts"]) == ("failed", 1)
    failure = state["failure"]
    assert (failure["cause"], failure["rank"], failure["attempt"]) == (cause, 1, 1)
    if fault != "spec":
        assert failure["message"] == message
    if fault == "user":
        assert failure["traceback"].startswith("Traceback (most recent call last):")
        assert "strike()" in failure["traceback"]
        assert "    ValueError: the labels are wrong" in jobs.console.lines
    assert str(run.log_path(1, 1)) in jobs.console.text
    assert f"serai explain {failure['code']}" in jobs.console.text


def test_a_crash_and_a_lost_peer_are_relaunched(jobs: Jobs) -> None:
    run = jobs.make("--fault", "SIGSEGV", "--fault-rank", "1")
    assert jobs.supervise(run) == 0
    assert next(iter(run.events("attempt_ended")))["cause"] == "crash"
    other = jobs.make("--fault", "peer", name="other")
    assert jobs.supervise(other) == 0
    assert next(iter(other.events("attempt_ended")))["cause"] == "collective"


@needs_root
@pytest.mark.skipif(
    not Path("/sys/fs/cgroup/memory/cgroup.procs").exists(),
    reason="needs a writable cgroup v1 memory hierarchy",
)
def test_a_kill_for_want_of_memory_is_named(jobs: Jobs) -> None:
    run = jobs.make("--fault", "oom", "--fault-rank", "1", processes=2, retry={"max": 0})
    try:
        assert jobs.supervise(run) == 1
    finally:
        for group in Path("/sys/fs/cgroup/memory").glob("serai-test-*"):
            group.rmdir()
    failure = run.state()["failure"]
    assert (failure["cause"], failure["rank"]) == ("out_of_memory_kill", 1)


def test_the_same_failure_at_the_same_step_ends_the_run_with_its_reason(jobs: Jobs) -> None:
    run = jobs.make("--fault", "SIGSEGV", "--always", retry={"max": 9})
    assert jobs.supervise(run) == 1
    assert run.state()["note"] == "2 failures in a row at step 6 without progress"
    assert run.state()["attempts"] == 2


def test_relaunches_are_counted(jobs: Jobs) -> None:
    run = jobs.make("--fault", "SIGKILL", "--always", retry={"max": 1})
    assert jobs.supervise(run) == 1
    assert run.state()["note"] == "retry.max = 1 relaunches are used up"


def test_a_hang_is_found_by_silence_and_relaunched(jobs: Jobs) -> None:
    run = jobs.make("--fault", "hang", processes=1, retry={"hang_timeout_s": 2.0})
    assert jobs.supervise(run) == 0
    ended = list(run.events("attempt_ended"))
    assert [event["cause"] for event in ended] == ["hang", None]


def test_a_frozen_rank_is_named(jobs: Jobs) -> None:
    run = jobs.make("--fault", "SIGSTOP", "--fault-rank", "1", "--steps", "9", retry={"hang_timeout_s": 2.0})
    assert jobs.supervise(run) == 0
    ended = next(iter(run.events("attempt_ended")))
    assert (ended["cause"], ended["first_failing_rank"]) == ("hang", 1)
    assert "rank 1 was stopped by a signal" in ended["message"]


def test_a_launcher_that_fails_is_relaunched_then_reported(jobs: Jobs) -> None:
    run = jobs.make("crash-launcher")
    assert jobs.supervise(run) == 1
    failure = run.state()["failure"]
    assert failure["cause"] == "launcher"
    assert "exit code 7" in failure["message"]


def test_children_of_workers_do_not_outlive_a_failure(jobs: Jobs) -> None:
    run = jobs.make("--child", "--fault", "user", processes=1)
    assert jobs.supervise(run) == 1  # the fixture asserts that nothing is left


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_request_saves_exits_75_and_resumes(jobs: Jobs, number: signal.Signals) -> None:
    run = jobs.make("--steps", "150", "--every", "1000", "--step-seconds", "0.02")
    process = jobs.start(run)
    wait_for(lambda: last_step(run) >= 3, what="step 3")
    process.send_signal(number)
    assert process.wait(timeout=20) == 75
    state = run.state()
    assert (state["status"], state["exit_code"]) == ("stopped", 75)
    stopped = next(iter(read_events(run.rank_events(0), kind="stopped")))["step"]
    assert 3 <= stopped < 150
    assert state["durable_step"] == stopped
    change_args(run, "--steps", str(stopped + 4))
    assert jobs.supervise(run) == 0
    assert next(iter(read_events(run.rank_events(0), kind="restored")))["step"] == stopped
    assert report(run)["progress"]["final_loss"] == expected_loss(stopped + 4)


def test_twice_stops_now(jobs: Jobs) -> None:
    run = jobs.make("--fault", "hang", "--fault-step", "4")
    process = jobs.start(run)
    wait_for(lambda: last_step(run) >= 3, what="step 3")
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "stop_requested" in kinds(run), what="the request is noted")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=15) == 130
    assert run.state()["status"] == "stopped"


def test_a_worker_that_ignores_the_request_is_killed_after_the_grace(jobs: Jobs) -> None:
    run = jobs.make("--fault", "hang", "--fault-step", "4", processes=1, retry={"stop_grace_s": 0.5})
    process = jobs.start(run)
    wait_for(lambda: last_step(run) >= 3, what="step 3")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=15) == 75
    assert run.state()["note"] == "stopped before the last steps were saved"


def test_workers_die_with_a_supervisor_that_is_killed_and_the_next_one_resumes(jobs: Jobs) -> None:
    run = jobs.make("--steps", "400", "--every", "2", "--child", "--step-seconds", "0.02")
    process = jobs.start(run)
    wait_for(lambda: last_step(run) >= 5, what="step 5")
    workers = [ProcessIdentity.of(pid) for pid in worker_pids(run)]
    process.kill()
    process.wait()
    wait_for(lambda: not any(worker.alive() for worker in workers), what="the workers are gone", seconds=5)
    assert run.state()["status"] == "interrupted"
    reached = last_step(run)
    change_args(run, "--steps", str(reached + 3))
    assert jobs.supervise(run) == 0
    assert report(run)["progress"]["final_loss"] == expected_loss(reached + 3)


def test_two_supervisors_of_one_run(jobs: Jobs) -> None:
    run = jobs.make("--steps", "500", "--step-seconds", "0.02")
    process = jobs.start(run)
    wait_for(lambda: last_step(run) >= 1, what="step 1")
    with pytest.raises(EnvironmentFault, match=f"process {process.pid} on") as caught:
        jobs.supervise(run)
    assert caught.value.code == "S502"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 75


def test_a_master_port_in_use_is_said_before_anything_starts(jobs: Jobs) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = jobs.make(resources={"master_port": taken.getsockname()[1]})
        with pytest.raises(EnvironmentFault, match="is in use") as caught:
            jobs.supervise(run)
    assert caught.value.code == "S515"
    assert run.state()["status"] == "failed"
    assert "attempt_started" not in kinds(run)


def test_a_missing_script(jobs: Jobs) -> None:
    run = jobs.workspace.create("gone", spec_text="", resolved={"name": "gone", "script": "no/such.py"})
    with pytest.raises(SpecError, match="no script at") as caught:
        jobs.supervise(run)
    assert caught.value.code == "S522"


def test_preparation_that_fails_fails_the_run(jobs: Jobs) -> None:
    class Offline(SeraiError):
        exit_code = 69

    def prepare(job: object, run: object, say: object) -> dict[str, Any]:
        raise Offline("the registry does not answer")

    run = jobs.workspace.create(
        "native",
        spec_text="",
        resolved={"name": "native", "data": {"corpus": "shakespeare"}, "train": {"steps": 5}},
    )
    with pytest.raises(Offline):
        jobs.supervise(run, prepare=prepare)
    assert (run.state()["status"], run.state()["exit_code"]) == ("failed", 69)


def test_a_stop_while_preparing(jobs: Jobs) -> None:
    def prepare(job: object, run: object, say: object) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        return {}

    run = jobs.workspace.create(
        "native",
        spec_text="",
        resolved={"name": "native", "data": {"corpus": "shakespeare"}, "train": {"steps": 5}},
    )
    began = time.monotonic()
    assert jobs.supervise(run, prepare=prepare) == 75
    assert time.monotonic() - began < 30
    assert run.state()["note"] == "stopped while preparing; no step was run"


def test_a_script_without_events_is_known_by_its_checkpoints(jobs: Jobs) -> None:
    saved = [
        SavedStep(3, 1000.0, loss=2.5, bytes=10, name="a"),
        SavedStep(5, 1001.0, loss=1.5, bytes=10, name="b"),
    ]

    def newest(root: str) -> SavedStep | None:
        return saved.pop(0) if len(saved) > 1 else saved[0]

    run = jobs.make("--no-events", "--steps", "5")
    assert jobs.supervise(run, newest_checkpoint=newest) == 0
    document = report(run)
    assert [(entry["step"], entry["loss"]) for entry in document["steps"]] == [(3, 2.5), (5, 1.5)]
    assert document["progress"]["last_durable_step"] == 5
    assert [entry["generation"] for entry in document["checkpoints"]] == ["a", "b"]
    assert any("loss 2.5000 at step 3" in line for line in jobs.console.lives)
    assert "learnt   loss 1.5000" in jobs.console.text


def test_a_script_that_tells_nothing_runs_too(jobs: Jobs) -> None:
    run = jobs.make("--no-events", "--steps", "5")
    assert jobs.supervise(run) == 0
    assert report(run)["progress"]["last_step"] is None
    assert "the script told no losses" in jobs.console.text


@needs_root
def test_a_disk_that_fills_up_ends_the_run_and_is_named(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(place)], check=True)
    jobs = Jobs(place / "ws")
    try:
        run = jobs.make("--steps", "5000", "--step-seconds", "0.02")
        process = jobs.start(run)
        wait_for(lambda: last_step(run) >= 3, what="step 3")
        with open(place / "filler", "wb", buffering=0) as stream:
            while os.statvfs(place).f_bavail:
                stream.write(b"\0" * 4096)
        _, words = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "[S514] demo failed: the disk is full (disk_full)" in words
        assert leftovers(run.path) == []
        (place / "filler").unlink()
        jobs.make()  # the same run again
        change_args(run, "--steps", str(last_step(run) + 3))
        assert jobs.supervise(run) == 0
    finally:
        jobs.close()
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_somebody_who_looks_is_no_supervisor(jobs: Jobs) -> None:
    run = jobs.make("--steps", "2")
    lock = run.path / "run.lock"
    lock.touch()
    with open(lock) as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        released = threading.Timer(0.05, lambda: fcntl.flock(looking, fcntl.LOCK_UN))
        released.start()
        assert jobs.supervise(run) == 0
        released.join()


def test_nohup_is_respected(jobs: Jobs) -> None:
    run = jobs.make("--steps", "60", "--step-seconds", "0.02")
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = jobs.start(run)
    finally:
        signal.signal(signal.SIGHUP, previous)
    wait_for(lambda: last_step(run) >= 3, what="step 3")
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=30) == 0


def test_workers_have_no_stdin_to_wait_on(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text("import sys; print('stdin:', repr(sys.stdin.read()))")
    run = jobs.make(script=str(script))
    assert jobs.supervise(run) == 0
    assert run.log_path(1, 0).read_text() == "stdin: ''\n"


def test_a_report_that_cannot_be_written_changes_no_exit_code(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: object, document: object) -> None:
        raise KeyError("evaluate")

    monkeypatch.setattr("serai.run.report.save", broken)
    run = jobs.make("--steps", "3")
    assert jobs.supervise(run) == 0
    assert run.state()["status"] == "finished"
    assert "the report could not be written: KeyError: 'evaluate'" in jobs.console.text
    assert "demo finished" in jobs.console.text
