"""Real training processes: one seed, one loss, whatever the layout and whatever happens on the way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.launching import Fault, Job, Workers, end_agents

import serai

STRATEGIES = ("ddp", "fsdp2")
STEPS = 8
# fp32 sums in another order (a rank's rows together, gradients in shards) move a loss of about 5 by some 1e-6.
TOLERANCE = 2e-5


def _job(workspace: Path, name: str, strategy: str, **train: Any) -> Job:
    job = Job(workspace, name, {"parallel": {"strategy": strategy}, "train": train})
    job.prepare()
    return job


def _generations(job: Job) -> list[Path]:
    return list((job.run_dir / "checkpoints").glob("step-*"))


def _forget_step_8(job: Job) -> None:
    (newest,) = (folder for folder in _generations(job) if "00000008" in folder.name)
    shutil.rmtree(newest)


def _assert_same_end(job: Job, other: Job) -> None:
    """The last checkpoints hold the same bits: weights, optimizer state, positions."""
    ends = [serai.load(str(each.run_dir / "checkpoints"), step=STEPS) for each in (job, other)]
    first, second = ({name: end[name] for name in COMPARED} for end in ends)
    _assert_same(first, second, "")


COMPARED = ("model", "optimizer", "scheduler", "loader", "progress")


def _assert_same(first: Any, second: Any, where: str) -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            _assert_same(first[key], second[key], f"{where}/{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for index, (one, two) in enumerate(zip(first, second, strict=True)):
            _assert_same(one, two, f"{where}/{index}")
    else:
        assert first == second, where


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("workspace")
    yield folder
    end_agents(folder)


@pytest.fixture(scope="module")
def uninterrupted(workspace: Path) -> dict[str, Job]:
    """One whole run of each strategy, over two processes."""
    jobs = {strategy: _job(workspace, f"whole-{strategy}", strategy) for strategy in STRATEGIES}
    for job in jobs.values():
        assert job.run(cold=True) == [0, 0]
    return jobs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_trains_reports_and_ends(uninterrupted: dict[str, Job], strategy: str) -> None:
    job = uninterrupted[strategy]
    steps = job.events("step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert {event["tokens"] for event in steps} == {2 * 4 * 16}
    assert all(float.fromhex(event["loss_hex"]) == event["loss"] for event in steps)
    assert [event["lr"] for event in steps[:3]] == [2.5e-3, 5e-3, 5e-3]
    assert all(
        event["seconds"] > 0 and event["tokens_per_s"] > 0 and event["grad_norm"] > 0 for event in steps
    )
    assert [event["step"] for event in job.events("evaluation")] == [4, 8]
    assert [event["step"] for event in job.events("save")] == [2, 4, 6, 8]
    assert job.events("durable")[-1]["step"] == 8
    for rank in (0, 1):
        (start,) = job.events("start", rank=rank)
        assert (start["world_size"], start["global_batch"]) == (2, 8)
        assert job.events("done", rank=rank)[0]["step"] == 8
        assert not job.events("error", rank=rank)
    assert not job.events("step", rank=1)


def test_ddp_fsdp2_and_one_process_follow_one_loss(uninterrupted: dict[str, Job], workspace: Path) -> None:
    alone = _job(workspace, "alone", "ddp")
    assert alone.run(processes=1) == [0]
    reference = alone.loss_values()
    assert len(reference) == STEPS
    for strategy, job in uninterrupted.items():
        assert job.loss_values() == pytest.approx(reference, abs=TOLERANCE), strategy
        for mine, theirs in zip(job.events("evaluation"), alone.events("evaluation"), strict=True):
            assert mine["tokens"] == theirs["tokens"]
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=TOLERANCE)
    first = {job.losses()[1] for job in uninterrupted.values()}
    assert len(first) == 1, "sharded and whole initial weights must be the same numbers"


def test_accumulation_changes_the_passes_and_not_the_loss(
    uninterrupted: dict[str, Job], workspace: Path
) -> None:
    job = _job(workspace, "accumulated", "fsdp2", micro_batch=1, grad_accumulation=4)
    assert job.run() == [0, 0]
    assert job.loss_values() == pytest.approx(uninterrupted["fsdp2"].loss_values(), abs=TOLERANCE)


def test_killed_twice_ddp_resumes_to_the_same_bits(uninterrupted: dict[str, Job], workspace: Path) -> None:
    job = _job(workspace, "killed-ddp", "ddp")
    began = time.monotonic()
    codes = job.run(attempt=1, fault=Fault.signal("SIGKILL", at_pass=5))
    assert codes == [1, -signal.SIGKILL]
    assert time.monotonic() - began < 60
    assert job.events("error")[0]["cause"] == "collective"
    kill_all = Fault.signal("SIGKILL", at_pass=2, ranks=(0, 1))
    assert job.run(attempt=2, fault=kill_all)[1] == -signal.SIGKILL
    assert job.run(attempt=3) == [0, 0]
    first, second = job.events("restored")
    assert (first["attempt"], second["attempt"]) == (2, 3)
    assert first["step"] in (2, 4)
    assert second["step"] >= first["step"]
    assert job.losses() == uninterrupted["ddp"].losses()
    _assert_same_end(job, uninterrupted["ddp"])
    assert (
        job.events("evaluation")[-1]["loss_hex"] == uninterrupted["ddp"].events("evaluation")[-1]["loss_hex"]
    )


def test_killed_then_stopped_fsdp2_resumes_to_the_same_bits(
    uninterrupted: dict[str, Job], workspace: Path
) -> None:
    job = _job(workspace, "killed-fsdp2", "fsdp2")
    job.run(attempt=1, fault=Fault.signal("SIGKILL", at_pass=5, ranks=(0, 1)))
    assert job.run(attempt=2, fault=Fault.signal("SIGTERM", at_pass=1)) == [75, 75]
    (restored,) = job.events("restored")
    assert restored["step"] in (2, 4)
    for rank in (0, 1):
        (stopped,) = job.events("stopped", rank=rank)
        assert stopped["step"] == restored["step"] + 1, "all ranks stop at the end of the step of the signal"
        assert stopped["reason"] == ("SIGTERM" if rank == 1 else "another rank")
    assert job.run(attempt=3) == [0, 0]
    assert job.events("restored")[1]["step"] == restored["step"] + 1
    assert job.losses() == uninterrupted["fsdp2"].losses()
    _assert_same_end(job, uninterrupted["fsdp2"])


def test_three_ddp_ranks_resume_to_the_same_bits(workspace: Path) -> None:
    """With three ranks sums depend on the buckets, and eight rows do not divide by three."""
    job = Job(workspace, "three", {"checkpoint": {"every": 4, "keep_last": 9}})
    job.prepare()
    assert job.run(processes=3) == [0, 0, 0]
    resumed = Job(workspace, "three-resumed", job.overrides)
    resumed.prepare()
    shutil.copytree(job.run_dir / "checkpoints", resumed.run_dir / "checkpoints")
    _forget_step_8(resumed)
    assert resumed.run(processes=3) == [0, 0, 0]
    assert resumed.events("restored")[0]["step"] == 4
    assert resumed.losses() == {step: loss for step, loss in job.losses().items() if step > 4}
    assert {event["tokens"] for event in job.events("step")} == {128}
    _assert_same_end(resumed, job)


def test_a_checkpoint_has_clean_names_and_moves_to_another_layout(
    uninterrupted: dict[str, Job], workspace: Path
) -> None:
    whole = uninterrupted["ddp"]
    step = max(
        int(folder.name.split("-")[1]) for folder in _generations(whole) if "00000008" not in folder.name
    )
    state = serai.load(str(whole.run_dir / "checkpoints"), step=step)
    assert "model.layers.0.self_attn.q_proj.weight" in state["model"]
    assert not [name for name in state["model"] if name.startswith("module.")]
    assert state["progress"]["step"] == state["loader"]["step"] == state["scheduler"]["step"] == step
    moved = _job(workspace, "moved", "fsdp2")
    shutil.copytree(whole.run_dir / "checkpoints", moved.run_dir / "checkpoints")
    _forget_step_8(moved)
    assert moved.run() == [0, 0]
    assert moved.events("restored")[0]["step"] == step
    assert moved.loss_values() == pytest.approx(whole.loss_values()[step:], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("fault", "cause", "says"),
    [
        ("loss = loss * float('nan')", "not_a_number", "the loss of step 3 is not a number (on rank 1)"),
        ("torch.empty(1 << 48)", "out_of_memory", "S603"),
        ("raise ValueError('a mistake of the user')", "user_error", "a mistake of the user"),
    ],
)
def test_what_goes_wrong_is_named_and_never_saved(workspace: Path, fault: str, cause: str, says: str) -> None:
    job = _job(workspace, f"faulty-{cause}", "ddp")
    assert job.run(fault=Fault(fault, at_pass=3)) == [1, 1]
    (error,) = job.events("error", rank=1)
    assert error["cause"] == cause
    assert says in error["message"]
    assert "Traceback" in error["traceback"]
    (other,) = job.events("error", rank=0)
    assert other["cause"] == (cause if cause == "not_a_number" else "collective")
    assert [event["step"] for event in job.events("save")] == [2]


def test_a_hung_peer_ends_within_the_time_out(workspace: Path) -> None:
    job = _job(workspace, "hung", "ddp", collective_timeout_s=5.0)
    with Workers.start(job, fault=Fault.signal("SIGSTOP", at_pass=4)) as workers:
        assert workers.processes[0].join(60.0) == 1
    steps, (error,) = job.events("step"), job.events("error")
    assert [event["step"] for event in steps] == [1, 2, 3]
    assert error["cause"] == "collective"
    assert 4.0 < error["time"] - steps[-1]["time"] < 40.0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_right_after_an_evaluation_names_every_parameter(
    uninterrupted: dict[str, Job], strategy: str
) -> None:
    """The last save follows an evaluation, after which FSDP2 would leave its outermost group gathered."""
    state = serai.load(str(uninterrupted[strategy].run_dir / "checkpoints"), step=8)
    assert set(state["optimizer"]["state"]) == set(state["model"]) - {"lm_head.weight"}


def test_a_stop_request_before_the_first_step_saves_nothing_and_is_resumable(workspace: Path) -> None:
    job = _job(workspace, "stopped-early", "ddp")
    assert job.run(fault=Fault.signal("SIGTERM", at_pass=0)) == [75, 75]
    assert job.events("stopped")[0]["step"] == 0
    assert not job.events("step")
    assert not job.events("save")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_computes_in_bf16_and_keeps_fp32_weights(
    uninterrupted: dict[str, Job], workspace: Path, strategy: str
) -> None:
    job = _job(workspace, f"bf16-{strategy}", strategy, precision="bf16")
    assert job.run() == [0, 0]
    exact = uninterrupted[strategy].loss_values()
    assert job.loss_values() == pytest.approx(exact, abs=0.03)
    assert job.loss_values() != exact
    state = serai.load(str(job.run_dir / "checkpoints"), step=STEPS)
    assert {tensor.dtype for tensor in state["model"].values()} == {torch.float32}


def test_torchruns_own_restart_resumes(workspace: Path) -> None:
    """Restarted workers share the agent's store with the dead ones' addresses in it."""
    job = _job(workspace, "restarted", "ddp", steps=60, evaluate_every=None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "-m", "serai.train.worker", str(job.run_dir / "resolved.json")]
    environment = {**os.environ, **job.environment()}
    with (job.run_dir / "torchrun.log").open("wb") as log:
        torchrun = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 90
        while not job.events("durable") and torchrun.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(job.events("start", rank=1)[0]["pid"], signal.SIGKILL)
        assert torchrun.wait(timeout=120) == 0, (job.run_dir / "torchrun.log").read_text()
    finally:
        torchrun.kill()
        torchrun.wait(timeout=30)
    assert len(job.events("start")) == 2
    assert job.events("restored")[0]["step"] >= 2
    assert sorted(job.losses()) == list(range(1, 61))
    assert job.events("done")[0]["step"] == 60


def test_a_finished_run_stays_finished(uninterrupted: dict[str, Job]) -> None:
    job = uninterrupted["ddp"]
    before = job.losses()
    assert job.run(attempt=2) == [0, 0]
    assert job.losses() == before
    assert [event["step"] for event in job.events("done")] == [8, 8]
    assert len(job.events("evaluation")) == 2
