"""What training reads of the world around it: torchrun's variables, the device, the resolved job."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.train.launching import Job

from serai.errors import EnvironmentFault, SpecError
from serai.train.job import TrainJob
from serai.train.launched import Launched
from serai.train.processes import choose_device
from serai.train.signals import StopFlag

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_torchruns_variables_are_read() -> None:
    launched = Launched.from_environment(TORCHRUN)
    assert (launched.rank, launched.world, launched.local_rank, launched.local_world) == (5, 8, 1, 4)
    assert launched.master == ("host", 29500)
    assert launched.agent_store
    assert launched.attempt == "run/2/8"


def test_each_restart_has_a_place_of_its_own_in_a_shared_store() -> None:
    again = Launched.from_environment({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"})
    assert again.attempt != Launched.from_environment(TORCHRUN).attempt


def test_without_a_launcher_it_is_one_process() -> None:
    launched = Launched.from_environment({})
    assert (launched.rank, launched.world, launched.master) == (0, 1, None)


def test_half_a_launch_is_refused() -> None:
    with pytest.raises(EnvironmentFault, match="MASTER_ADDR") as caught:
        Launched.from_environment({"RANK": "0", "WORLD_SIZE": "2"})
    assert caught.value.code == "S233"


@pytest.mark.parametrize(
    ("wanted", "gpus", "local_rank", "expected"),
    [
        ("auto", 0, 1, "cpu"),
        ("auto", 3, 1, "cpu"),
        ("cpu", 4, 0, "cpu"),
        ("auto", 4, 1, "cuda:1"),
        ("cuda", 8, 3, "cuda:3"),
    ],
)
def test_each_process_gets_a_device(
    monkeypatch: pytest.MonkeyPatch, wanted: str, gpus: int, local_rank: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    launched = Launched.from_environment({**TORCHRUN, "LOCAL_RANK": str(local_rank)})
    assert str(choose_device(wanted, launched)) == expected


@pytest.mark.parametrize("gpus", [0, 3])
def test_too_few_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(EnvironmentFault, match=f"{gpus} found") as caught:
        choose_device("cuda", Launched.from_environment(TORCHRUN))
    assert caught.value.code == "S231"
    assert caught.value.next_step == (
        "set `resources: {processes: 3}`" if gpus else "set `resources: {device: cpu}`"
    )


def test_a_resolved_job_of_a_later_version_is_read(tmp_path: Path) -> None:
    document = Job(tmp_path).document()
    document["train"]["invented_later"] = 3
    document["studio"] = {"port": 1}
    (tmp_path / "resolved.json").write_text(json.dumps(document))
    job = TrainJob.read(tmp_path / "resolved.json")
    assert job.train.steps == 8
    assert job.global_batch == 4 * 1 * 2
    assert job.stop_grace_s == 60.0


@pytest.mark.parametrize("content", [None, "{", "{}", '{"data": {}, "train": {"steps": 1}}'])
def test_what_is_no_resolved_job_is_a_clear_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "resolved.json").write_text(content)
    with pytest.raises(SpecError) as caught:
        TrainJob.read(tmp_path / "resolved.json")
    assert caught.value.code == "S620"


def test_a_stop_request_is_a_flag_and_a_second_ctrl_c_interrupts() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop = StopFlag()
        stop.listen()
        reasons = [stop.reason]
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            reasons.append(stop.reason)
        assert reasons == [None, "SIGTERM", "SIGINT"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
