"""Which of several failures is the cause, and what follows from it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from serai.run.attempt import AttemptEnd
from serai.run.causes import Cause, Failure, classify, rule_of
from serai.run.config import RetryConfig
from serai.run.policy import RetryPolicy

TRACE = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    step()
  File "train.py", line 1, in step
    raise {error}
{error}
"""


def end(exits: dict[int, int | None], *, order: list[int] | None = None, **fields: Any) -> AttemptEnd:
    deaths = [(rank, 100.0 + place) for place, rank in enumerate(order or sorted(exits))]
    return AttemptEnd(exits=exits, deaths=deaths, **fields)


def log(folder: Path, rank: int, error: str, *, before: str = "starting\n", after: str = "") -> None:
    (folder / f"rank-{rank:05d}.log").write_text(before + TRACE.format(error=error) + after)


def judge(folder: Path, found: AttemptEnd, **options: Any) -> Failure:
    return classify(found, errors=options.pop("errors", {}), log_dir=folder, **options)


def test_a_kill_explains_the_peers_lost_connection(tmp_path: Path) -> None:
    log(tmp_path, 0, "RuntimeError: [../gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:3")
    failure = judge(tmp_path, end({0: 1, 1: -signal.SIGKILL}))
    assert (failure.cause, failure.rank, failure.message) == (
        Cause.KILLED,
        1,
        "killed from outside (SIGKILL)",
    )


def test_a_bug_explains_the_peers_lost_connection_whoever_died_first(tmp_path: Path) -> None:
    log(tmp_path, 0, "torch.distributed.DistBackendError: NCCL error")
    log(tmp_path, 1, "KeyError: 'labels'")
    failure = judge(tmp_path, end({0: 1, 1: 1}, order=[0, 1]))
    assert (failure.cause, failure.rank, failure.message) == (Cause.USER_ERROR, 1, "KeyError: 'labels'")
    assert failure.traceback is not None
    assert failure.traceback.startswith("Traceback")
    assert failure.traceback.endswith("KeyError: 'labels'")


def test_among_equals_the_first_to_die_is_named(tmp_path: Path) -> None:
    for rank in range(3):
        log(tmp_path, rank, f"ValueError: rank {rank}", after="cleaning up\n")
    failure = judge(tmp_path, end({0: 1, 1: 1, 2: 1}, order=[2, 0, 1]))
    assert (failure.rank, failure.message) == (2, "ValueError: rank 2")


def test_those_that_were_ended_by_the_launcher_are_no_cause(tmp_path: Path) -> None:
    log(tmp_path, 0, "ValueError: bad")
    failure = judge(tmp_path, end({0: 1, 1: -signal.SIGTERM}, killed={1}))
    assert (failure.cause, failure.rank) == (Cause.USER_ERROR, 0)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", Cause.DISK_FULL),
        ("serai.errors.StorageFull: [S303] the disk is full", Cause.DISK_FULL),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB", Cause.OUT_OF_MEMORY),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: Cannot allocate memory", Cause.OUT_OF_MEMORY),
        ("RuntimeError: Timed out waiting 15000ms for recv operation to complete", Cause.COLLECTIVE),
        ("torch.distributed.DistNetworkError: The client socket has timed out", Cause.COLLECTIVE),
        ("ValueError: the disk of labels", Cause.USER_ERROR),
    ],
)  # fmt: skip
def test_errors_by_their_words(tmp_path: Path, error: str, cause: Cause) -> None:
    log(tmp_path, 0, error)
    assert judge(tmp_path, end({0: 1})).cause is cause


def test_a_workers_own_word_counts_more_than_its_log(tmp_path: Path) -> None:
    log(tmp_path, 0, "RuntimeError: Connection reset by peer")
    errors = {0: {"cause": "nan", "message": "loss is nan at step 3", "traceback": None}}
    failure = judge(tmp_path, end({0: 1}), errors=errors)
    assert (failure.cause, failure.message) == (Cause.NOT_A_NUMBER, "loss is nan at step 3")


def test_a_kill_for_memory_is_told_from_any_other(tmp_path: Path) -> None:
    killed = end({0: -signal.SIGKILL})
    assert judge(tmp_path, killed, oom_killed=True).cause is Cause.OUT_OF_MEMORY_KILL
    assert judge(tmp_path, killed, oom_killed=False).cause is Cause.KILLED
    assert judge(tmp_path, end({0: -signal.SIGBUS}), oom_killed=True).cause is Cause.CRASH


def test_the_error_file_of_torchruns_record(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.error.json").write_text(
        '{"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": "Traceback ..."}}}'
    )
    failure = judge(tmp_path, end({0: 1}))
    assert (failure.message, failure.traceback) == ("ValueError: bad", "Traceback ...")


def test_a_busy_port_is_only_final_when_the_job_names_it(tmp_path: Path) -> None:
    busy = AttemptEnd(launcher_error="DistNetworkError: bind failed: EADDRINUSE, address already in use")
    assert judge(tmp_path, busy, fixed_port=True).cause is Cause.PORT_IN_USE
    assert judge(tmp_path, busy, fixed_port=False).cause is Cause.COLLECTIVE


def test_an_end_without_any_word_is_the_launchers(tmp_path: Path) -> None:
    assert judge(tmp_path, AttemptEnd(exits={0: None})).cause is not Cause.LAUNCHER
    assert judge(tmp_path, AttemptEnd()).cause is Cause.LAUNCHER


def test_every_cause_has_its_rule_and_its_own_code() -> None:
    codes = [rule_of(cause).code for cause in Cause]
    assert len(set(codes)) == len(codes)
    assert all(code.startswith("S5") for code in codes)


def failure(cause: Cause) -> Failure:
    return Failure(cause, 0, "x", None, None)


def test_progress_earns_patience_and_no_delay() -> None:
    policy = RetryPolicy(RetryConfig(max=10, backoff_s=3.0))
    assert policy.after(failure(Cause.CRASH), step=5, durable=None).delay == 0.0
    assert policy.after(failure(Cause.CRASH), step=9, durable=None) == policy.after(
        failure(Cause.KILLED), step=12, durable=None
    )
    again = policy.after(failure(Cause.KILLED), step=12, durable=None)
    assert (again.relaunch, again.delay) == (True, 3.0)
    assert policy.after(failure(Cause.COLLECTIVE), step=3, durable=None).delay == 6.0
    assert policy.after(failure(Cause.COLLECTIVE), step=3, durable=10).delay == 0.0


def test_delays_are_bounded() -> None:
    policy = RetryPolicy(RetryConfig(max=100, backoff_s=100.0))
    delays = [policy.after(failure(Cause.KILLED), step=-step, durable=None).delay for step in range(6)]
    assert delays == [0.0, 100.0, 200.0, 300.0, 300.0, 300.0]


def test_repeating_without_progress_ends_it() -> None:
    policy = RetryPolicy(RetryConfig(max=10, backoff_s=0.0))
    decisions = [policy.after(failure(Cause.KILLED), step=None, durable=None) for _ in range(3)]
    assert [decision.relaunch for decision in decisions] == [True, True, False]
    assert decisions[-1].reason == "3 failures in a row before the first step without progress"


def test_no_retries() -> None:
    decision = RetryPolicy(RetryConfig(max=0)).after(failure(Cause.KILLED), step=3, durable=None)
    assert (decision.relaunch, decision.reason) == (False, "retry.max = 0 relaunches are used up")
