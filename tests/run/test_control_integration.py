"""``serai stop`` against live, dead, foreign and ended supervisors."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.run.support import Jobs, last_step, wait_for

from serai.run.control import StopAnswer, stop
from serai.run.processes import ProcessIdentity


def test_a_live_run_saves_and_stops(jobs: Jobs) -> None:
    run = jobs.make("--steps", "500", "--step-seconds", "0.02")
    process = jobs.start(run)
    wait_for(lambda: last_step(run) >= 2, what="step 2")
    result = stop(run, wait=15)
    assert (result.answer, result.pid) == (StopAnswer.STOPPED, process.pid)
    assert process.wait(timeout=10) == 75
    assert next(iter(run.events("stop_requested")))["by"] == "serai stop"
    assert run.state()["durable_step"] == last_step(run)


def test_the_file_alone_is_enough(jobs: Jobs) -> None:
    """As for a supervisor on another host, which no signal reaches."""
    run = jobs.make("--steps", "500", "--step-seconds", "0.02")
    process = jobs.start(run)
    wait_for(lambda: last_step(run) >= 2, what="step 2")
    lock = run.path / "run.lock"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "host": "elsewhere"}))
    result = stop(run)
    assert (result.answer, result.host) == (StopAnswer.OTHER_HOST, "elsewhere")
    assert process.wait(timeout=15) == 75


def test_a_request_does_not_outlive_its_run(jobs: Jobs) -> None:
    run = jobs.make("--steps", "4")
    run.stop_path.write_text('{"by": "an old request"}')
    assert jobs.supervise(run) == 0


def test_a_dead_supervisor_is_said_and_the_run_marked(jobs: Jobs) -> None:
    run = jobs.make("--steps", "500", "--step-seconds", "0.02")
    process = jobs.start(run)
    wait_for(lambda: last_step(run) >= 2, what="step 2")
    process.kill()
    process.wait()
    result = stop(run)
    assert result.answer is StopAnswer.SUPERVISOR_DEAD
    assert f"process {process.pid}" in result.message
    assert json.loads((run.path / "run.json").read_text())["status"] == "interrupted"
    assert stop(run).answer is StopAnswer.SUPERVISOR_DEAD


def test_a_finished_run_is_not_running(jobs: Jobs) -> None:
    run = jobs.make("--steps", "3")
    assert jobs.supervise(run) == 0
    result = stop(run)
    assert (result.answer, result.message) == (StopAnswer.NOT_RUNNING, "demo is not running (finished)")


def test_a_process_that_only_has_the_number_is_never_signalled(jobs: Jobs) -> None:
    run = jobs.make("--steps", "3")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as bystander, run.lock():
        lock = run.path / "run.lock"
        document = json.loads(lock.read_text())
        lock.write_text(json.dumps({**document, "pid": bystander.pid}))
        run.update(status="running")
        assert stop(run).answer is StopAnswer.ASKED
        assert ProcessIdentity.of(bystander.pid).alive()
        assert bystander.poll() is None
        bystander.kill()
    assert ProcessIdentity.of(os.getpid()).alive()
