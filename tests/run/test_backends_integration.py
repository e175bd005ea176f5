"""The local back end: what it says it would do, and that it does it."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from tests.run.support import HERE, Jobs, document, last_step, wait_for

from serai.errors import EnvironmentFault, SpecError
from serai.run.backends import BACKENDS, backend
from serai.run.backends.base import Backend
from serai.run.backends.local import LocalBackend
from serai.run.job import Job
from serai.run.workspace import Run


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor with the launcher that needs no torch."""
    command = [sys.executable, str(HERE / "supervise.py")]
    monkeypatch.setattr(LocalBackend, "_command", staticmethod(lambda run_dir: [*command, str(run_dir)]))


def test_the_table_holds_back_ends() -> None:
    for name in BACKENDS:
        assert isinstance(backend(name), Backend)
        assert backend(name).name == name
    with pytest.raises(SpecError, match="no back end 'cloud'") as caught:
        backend("cloud")
    assert caught.value.code == "S533"


def test_the_request_is_exact_and_has_no_effect(tmp_path: Path) -> None:
    job = Job.from_document(document("demo", "--steps", "4"), folder=tmp_path)
    run = Run(tmp_path / "runs" / "demo-abc123")
    command, request_text = backend("local").render(job, run.path, attempt=2).split("\n", 3)[1::2]
    assert shlex.split(command) == [sys.executable, "-m", "serai.run", str(run.path)]
    request = json.loads(request_text)
    assert request["processes"] == 2
    assert request["command"][-2:] == ["--steps", "4"]
    assert request["environment"]["SERAI_ATTEMPT"] == "2"
    assert request["log_dir"] == str(run.log_dir(2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("light")
def test_submit_status_cancel(jobs: Jobs) -> None:
    run, place = jobs.make("--steps", "500", "--step-seconds", "0.02"), backend("local")
    assert not place.status(run).alive
    submission = place.submit(run)
    holder = run.holder()
    assert holder is not None
    assert submission.handle == str(holder.pid)
    wait_for(lambda: last_step(run) >= 2, what="step 2")
    assert place.status(run).alive
    with pytest.raises(EnvironmentFault) as caught:
        place.submit(run)
    assert caught.value.code == "S534"
    assert "S502" in (run.path / "supervisor.log").read_text()
    assert "asked demo to save and stop" in place.cancel(run)
    wait_for(lambda: not place.status(run).alive, what="the end")
    assert (place.status(run).status, place.status(run).exit_code) == ("stopped", 75)
