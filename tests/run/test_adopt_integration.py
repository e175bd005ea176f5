"""``run`` on a name that is there already: resume, leave alone, go on, or show the difference."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.run.support import FAKE_WORKER, Jobs, Recorder, fake_services

from serai.errors import SpecError
from serai.run.supervisor import run
from serai.spec.resolve import resolve


def job(folder: Path, *args: str, **sections: object) -> Path:
    path = folder / "job.yaml"
    document = {"serai": 1, "name": "demo", "script": str(FAKE_WORKER), "args": list(args), **sections}
    path.write_text(yaml.safe_dump(document))
    return path


def go(jobs: Jobs, path: Path, *overrides: str) -> tuple[int, str]:
    console = Recorder()
    code = run(resolve(path, overrides), jobs.workspace, console=console, services=fake_services())
    return code, console.text


def test_a_finished_run_says_so_and_is_left_alone(jobs: Jobs, tmp_path: Path) -> None:
    path = job(tmp_path, "--steps", "4")
    assert go(jobs, path)[0] == 0
    (found,) = jobs.workspace.runs()
    before = found.state()
    code, text = go(jobs, path)
    assert code == 0
    assert text.startswith(f"demo is finished already ({found.id})")
    assert found.state() == before
    assert before["job_file"] == str(path)
    assert before["command"] == f"serai run {path}"


def test_the_next_command_repeats_the_overrides(jobs: Jobs, tmp_path: Path) -> None:
    path = job(tmp_path, "--steps", "400", "--step-seconds", "0.02", "--fault", "user", "--fault-step", "2")
    code, text = go(jobs, path, "name=other", "args=[--steps, 4, --fault, user, --fault-step, 2]")
    assert code == 1
    assert (
        f"serai run {path} --set name=other --set 'args=[--steps, 4, --fault, user, --fault-step, 2]'" in text
    )


def test_a_failed_run_resumes_and_says_so_and_free_keys_take_effect(jobs: Jobs, tmp_path: Path) -> None:
    args = ["--steps", "9", "--fault", "SIGKILL", "--fault-step", "7"]
    assert go(jobs, job(tmp_path, *args, retry={"max": 0}))[0] == 1
    code, text = go(jobs, job(tmp_path, *args, retry={"max": 1}))
    assert code == 0
    assert text.startswith("resuming demo (demo-")
    assert "failed after 1 attempts" in text
    (found,) = jobs.workspace.runs()
    assert found.resolved()["retry"]["max"] == 1
    assert found.state()["attempts"] == 2


def test_a_changed_spec_is_an_error_that_shows_the_difference(jobs: Jobs, tmp_path: Path) -> None:
    assert go(jobs, job(tmp_path, "--steps", "4"))[0] == 0
    (found,) = jobs.workspace.runs()
    stored = found.resolved_path.read_text()
    with pytest.raises(SpecError) as caught:
        go(jobs, job(tmp_path, "--steps", "5"))
    assert caught.value.exit_code == 2
    assert [problem.key for problem in caught.value.problems] == ["args"]
    assert found.resolved_path.read_text() == stored


NATIVE = {
    "serai": 1,
    "name": "native",
    "model": {"preset": "tiny"},
    "data": {"corpus": "shakespeare"},
    "train": {"steps": 10},
}


def test_more_steps_go_on_and_fewer_are_a_changed_spec(jobs: Jobs, tmp_path: Path) -> None:
    from serai.run.adopt import adopt

    path = tmp_path / "native.yaml"
    path.write_text(yaml.safe_dump(NATIVE))
    spec = resolve(path)
    found = jobs.workspace.create("native", spec_text=spec.text, resolved=spec.to_json())
    console = Recorder()
    assert adopt(found, spec, console=console)
    assert console.lines == []
    found.update(status="finished", attempts=1)
    assert not adopt(found, spec, console=console)
    assert adopt(found, resolve(path, ["train.steps=20"]), console=console)
    assert "train.steps grew from 10 to 20" in console.text
    assert found.resolved()["train"]["steps"] == 20
    with pytest.raises(SpecError, match=r"train\.steps: 20 → 10"):
        adopt(found, spec, console=console)
