"""The short campaign finds nothing, and finds what is broken on purpose."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.faults import campaign, crashes, damage, failing, machine, peers
from benchmarks.faults.machine import private_runtime
from benchmarks.faults.recorder import Recorder
from benchmarks.faults.tally import Outcome, Tally

from serai.checkpoint import source
from serai.checkpoint.agent import publish
from serai.checkpoint.agent.tier import Tier
from serai.errors import SeraiError
from serai.storage import local
from serai.storage._posix import FileWriter


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("serai")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    with private_runtime():
        yield
    logger.setLevel(before)


@pytest.mark.parametrize("part", [part for part in campaign.PARTS if part != "dcp"])
def test_the_short_campaign_finds_nothing(part: str) -> None:
    tally = Tally()
    campaign.run(tally, seed=3, short=True, only=[part], progress=lambda line: None)
    assert tally.problems == []
    assert tally.total() >= campaign.LEAST[part]


def test_the_same_faults_load_wrong_bytes_elsewhere() -> None:
    tally = Tally()
    campaign.run(tally, seed=3, short=True, only=["dcp"], progress=lambda line: None)
    assert tally.total(peers.ENGINE) >= 60
    assert tally.counts[peers.ENGINE, "bit flip in shards"][Outcome.WRONG] > 0


def crash(name: str, per_point: int = 2) -> Tally:
    tally = Tally()
    crashes.try_history(crashes.record(name, crashes.HISTORIES[name]), tally, seed=1, per_point=per_point)
    return tally


def test_a_folder_that_is_not_flushed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_sync_folder", lambda folder: None)
    assert any("lost" in problem for problem in crash("keep=2").problems)


def test_a_file_that_is_not_flushed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileWriter, "finish", lambda self: os.ftruncate(self._buffered, self._size))
    assert any("lost" in problem for problem in crash("keep=1").problems)


def test_retention_before_the_commit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = publish.commit

    def eager(storage: Any, manifest: Any, values: bytes) -> None:
        for name in storage.list_folders(""):
            if name.startswith("step-") and name != manifest.name:
                storage.delete_folder(f"{name}/")
        real(storage, manifest, values)

    monkeypatch.setattr("serai.checkpoint.agent.tier.commit", eager)
    assert any("lost" in problem for problem in crash("keep=1").problems)


def test_bytes_that_nobody_checks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = source._run
    monkeypatch.setattr(source, "_run", lambda s, job, copies, *, check: run(s, job, copies, check=False))
    tally = Tally()
    damage.try_damage(tally, seed=1, flips_in_shards=60, every_byte=False)
    assert tally.counts["serai", "bit flip in shards"][Outcome.WRONG] > 0
    assert any("wrong bytes" in problem for problem in tally.problems)


def test_a_swallowed_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Tier._write

    def swallow(self: Tier, generation: Any) -> Any:
        with contextlib.suppress(SeraiError):
            return real(self, generation)

    monkeypatch.setattr(Tier, "_write", swallow)
    # Whatever fails before the commit: the save then says durable, and nothing is there.
    for first in (4, 12, 20):
        hit, verdict = failing.strike(first, errno.EIO, True, 2)
        assert verdict.outcome is Outcome.WRONG, hit
        assert "said durable" in verdict.detail


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Tier._process

    def die(self: Tier, generation: Any) -> None:
        real(self, generation)
        if generation.failures:
            raise SystemExit

    monkeypatch.setattr(Tier, "_process", die)
    monkeypatch.setattr(failing, "_LIMIT_S", 1.0)
    monkeypatch.setattr(machine, "_LEAVE_S", 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the save failed is said, and meant here
        verdict = failing.strike(12, errno.EIO, True, 2)[1]
    assert verdict.outcome is Outcome.HUNG


def test_a_recording_that_misses_calls_is_refused(tmp_path: Path) -> None:
    def act(plot: crashes.Plot) -> None:
        plot.run([1], keep=crashes.serai.Keep(last=1))
        with open(plot.root / "latest.json", "ab") as stream:  # a call that goes past the recorder
            stream.write(b" ")

    with pytest.raises(AssertionError, match="misses calls"):
        crashes.record("leaky", act)


def test_the_recorder_gives_everything_back(tmp_path: Path) -> None:
    before = (os.open, os.fsync, os.rename, os.pwrite)
    with Recorder(tmp_path):
        assert os.open is not before[0]
    assert (os.open, os.fsync, os.rename, os.pwrite) == before
