"""Run folders: made whole or not at all, found by reference, locked by the kernel."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.needs import needs_root

from serai.errors import EnvironmentFault, SeraiError, SpecError
from serai.run.lock import LockHolder, RunLock
from serai.run.workspace import Run, Workspace


def make(workspace: Workspace, name: str) -> Run:
    return workspace.create(name, spec_text=f"name: {name}\n", resolved={"name": name})


def fails(code: str, workspace: Workspace, name: str = "demo") -> SeraiError:
    with pytest.raises(SeraiError) as caught:
        make(workspace, name)
    assert caught.value.code == code
    assert caught.value.next_step
    return caught.value


def test_a_new_run_has_everything(tmp_path: Path) -> None:
    run = make(Workspace(tmp_path / "ws"), "demo")
    assert run.name == "demo"
    assert run.id.startswith("demo-")
    assert len(run.id) == len("demo-") + 6
    assert run.spec_path.read_text() == "name: demo\n"
    assert run.resolved() == {"name": "demo"}
    state = run.state()
    assert state["schema_version"] == 1
    assert (state["id"], state["name"], state["attempts"], state["exit_code"]) == (run.id, "demo", 0, None)
    assert sorted(entry.name for entry in (tmp_path / "ws/runs").iterdir()) == [".create.lock", run.id]


def test_one_run_a_name(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert make(workspace, "demo") == make(workspace, "demo")
    assert make(workspace, "demo-2") != make(workspace, "demo")


def _create(folder: str, barrier: Any) -> str:
    barrier.wait(20)
    return make(Workspace(folder), "demo").id


def test_two_creators_at_once_make_one_run(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(4) as pool:
        barrier = manager.Barrier(4)
        ids = pool.starmap(_create, [(str(tmp_path), barrier)] * 4)
    assert len(set(ids)) == 1


def test_references(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    first, second = make(workspace, "alpha"), make(workspace, "alpine")
    assert workspace.find("alpha") == first
    assert workspace.find(second.id[:-2]) == second
    assert workspace.find("@last") == second
    assert workspace.runs() == [second, first]
    with pytest.raises(SpecError, match="more than one run") as caught:
        workspace.find("alp")
    assert first.id in str(caught.value.expected)
    with pytest.raises(SpecError, match="names no run"):
        workspace.find("beta")


def test_no_workspace_has_no_runs_and_is_not_made_by_looking(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "none")
    assert workspace.runs() == []
    with pytest.raises(SpecError, match="no run"):
        workspace.find("@last")
    assert not workspace.path.exists()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fails("S501", Workspace(tmp_path / "file"))
    assert str(tmp_path / "file") in str(fails("S501", Workspace(tmp_path / "file" / "below")).where)
    other = Workspace(tmp_path / "ws")
    other.path.mkdir()
    (other.path / "runs").write_text("")
    fails("S501", other)


@pytest.mark.parametrize("name", ["", "../x", "a b", ".hidden", "a/b"])
def test_names_that_are_no_folders(tmp_path: Path, name: str) -> None:
    fails("S508", Workspace(tmp_path), name)


@needs_root
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for folder in list(tmp_path.parents)[:2]:
        folder.chmod(0o755)
    script = (
        "import os, sys; from serai.run.workspace import Workspace; from serai.errors import SeraiError\n"
        "os.setgid(65534); os.setuid(65534)\n"
        f"try: Workspace({str(tmp_path / 'ws')!r}).create('demo', spec_text='', resolved={{}})\n"
        "except SeraiError as error: print(error.code, error.message)\n"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert answer.startswith("S506 no permission to write ")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@needs_root
def test_a_full_disk_leaves_nothing_half_written(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"\0" * (79 << 20))
    error = fails("S505", Workspace(small_disk / "ws"))
    assert "MiB free" in error.message
    with open(small_disk / "rest", "wb", buffering=0) as stream:
        while os.statvfs(small_disk).f_bavail:
            stream.write(b"\0" * 4096)
    fails("S505", Workspace(small_disk / "ws"))
    assert [path for path in (small_disk / "ws").rglob("*") if path.is_file()] == []


@needs_root
def test_a_read_only_disk(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    fails("S507", Workspace(small_disk / "ws"))


def test_damaged_and_missing_state(tmp_path: Path) -> None:
    run = make(Workspace(tmp_path), "demo")
    (run.path / "run.json").write_text('{"status": ')
    with pytest.raises(EnvironmentFault) as caught:
        run.state()
    assert caught.value.code == "S509"
    with pytest.raises(SpecError) as missing:
        Run(tmp_path).state()
    assert missing.value.code == "S504"


def test_a_live_status_without_a_supervisor_is_interrupted(tmp_path: Path) -> None:
    run = make(Workspace(tmp_path), "demo")
    run.update(status="running")
    assert run.state()["status"] == "interrupted"
    with run.lock():
        assert run.state()["status"] == "running"
    run.update(status="finished")
    assert run.state()["status"] == "finished"


def test_the_lock_names_its_holder_and_is_never_stale(tmp_path: Path) -> None:
    path = tmp_path / "run.lock"
    script = (
        "import sys, time; from pathlib import Path; from serai.run.lock import RunLock\n"
        f"lock = RunLock(Path({str(path)!r}), name='demo').acquire(); print('locked', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        holder = RunLock.held(path)
        assert holder is not None
        assert holder.pid == process.pid
        assert holder.alive_here()
        with pytest.raises(EnvironmentFault, match=f"process {process.pid} on {os.uname().nodename}, since"):
            RunLock(path, name="demo").acquire()
        process.kill()
        process.wait()
    assert RunLock.held(path) is None
    with RunLock(path, name="demo") as lock:
        assert lock.kernel
        assert RunLock.held(path) is not None


def test_without_flock_the_recorded_process_stands_in_and_that_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def unsupported(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("serai.run.lock.fcntl.flock", unsupported)
    path = tmp_path / "run.lock"
    with RunLock(path, name="demo") as lock:
        assert not lock.kernel
        assert "without flock" in str(lock.note)
        with pytest.raises(EnvironmentFault) as caught:
            RunLock(path, name="demo").acquire()
        assert caught.value.code == "S502"
    holder = LockHolder.read(path)
    assert holder is not None
    path.write_text(json.dumps({"pid": holder.pid, "host": holder.host, "since": 0.0, "identity": "1"}))
    RunLock(path, name="demo").acquire().release()  # that pid is another process by now
