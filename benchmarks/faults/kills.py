"""Real processes, really killed: trainers, agents, both, at random moments and between two system calls."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import serai
from benchmarks.faults.tally import Outcome, Tally
from benchmarks.faults.trainers import mark_of
from serai.errors import CheckpointNotFound, SeraiError

__all__ = ["KINDS", "compile_shim", "try_kills"]

_START_S = 60.0
_RECOVER_S = 60.0
_SOURCE = Path(__file__).with_name("shim.c")
_KILL, _KILL_BOTH, _STOP, _EIO, _ENOSPC = 1, 2, 3, 4, 5


def compile_shim(folder: Path) -> Path | None:
    """The library that acts between two system calls of an agent; ``None`` without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    target = folder / "shim.so"
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", str(target), str(_SOURCE), "-ldl"], capture_output=True
    )
    return target if done.returncode == 0 else None


class Control:
    """Four numbers shared with the shim; see ``shim.c``."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(struct.pack("4q", -1, 0, 0, 0))
        with open(path, "r+b") as stream:
            self._map = mmap.mmap(stream.fileno(), 32)

    def arm(self, after: int, action: int, group: int) -> None:
        count = self.count
        self._map[16:32] = struct.pack("2q", action, group)
        self._map[0:8] = struct.pack("q", count + after)

    @property
    def count(self) -> int:
        return int(struct.unpack("4q", self._map[:32])[1])

    @property
    def fired(self) -> bool:
        return bool(struct.unpack("q", self._map[:8])[0] < 0)

    def disarm(self) -> None:
        self._map[0:8] = struct.pack("q", -1)


@dataclass
class Diary:
    """What the ranks of one job wrote down; ``durable`` is the newest step any of them heard of."""

    lines: list[str]

    def last(self, letter: str) -> int:
        return max((int(line.split()[1]) for line in self.lines if line.startswith(letter + " ")), default=0)

    @property
    def resumed(self) -> list[str]:
        return [line for line in self.lines if line.startswith("R ")]

    @property
    def failure(self) -> str:
        return next((line[2:] for line in self.lines if line.startswith("X ")), "")

    @property
    def slowest_call(self) -> float:
        return max((float(line.split()[2]) for line in self.lines if line.startswith("C ")), default=0.0)


class Stage:
    """One root, the zygote that forks trainers for it, and what is known to be durable there."""

    def __init__(self, base: Path, shim: Path | None) -> None:
        self.base = base
        self.root = base / "root"
        self._shim = shim
        self._runtime = base / "run"
        self._runtime.mkdir(mode=0o700)
        self.control = Control(base / "control")
        self._jobs = 0
        self.durable = 0
        self.saved = 0
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.faults.trainers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._zygote.stdout is not None
        self._zygote.stdout.readline()

    def start(
        self, *, ranks: int = 1, keep: int = 2, memory: bool = True, pause: float = 0.01
    ) -> tuple[int, Path]:
        """A job; its process group and diary."""
        self._jobs += 1
        diary = self.base / f"diary-{self._jobs}"
        environment = {"XDG_RUNTIME_DIR": str(self._runtime)}
        if self._shim is not None:
            environment |= {
                "LD_PRELOAD": str(self._shim),
                "FAULT_CONTROL": str(self.base / "control"),
                "FAULT_ROOT": str(self.root),
            }
        job = {
            "root": str(self.root),
            "diary": str(diary),
            "meeting": str(self.base / f"meeting-{self._jobs}"),
            "ranks": ranks,
            "keep": keep,
            "memory": memory,
            "pause": pause,
            "environment": environment,
        }
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(job) + "\n")
        self._zygote.stdin.flush()
        return int(self._zygote.stdout.readline()), diary

    def read(self, diary: Path) -> Diary:
        lines: list[str] = []
        for path in sorted(self.base.glob(diary.name + ".*")):
            text = path.read_text()
            lines += text[: text.rfind("\n") + 1].splitlines()
        found = Diary(lines)
        self.durable = max(self.durable, found.last("D"))
        return found

    def agents(self) -> list[int]:
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            command = process.info["cmdline"] or []
            if (
                any(str(self._runtime) in part for part in command)
                and "--ready" in command
                and process.info["status"] != "zombie"
            ):
                found.append(process.pid)
        return found

    def clear(self) -> None:
        """A fresh root, no agent, no memory."""
        for pid in self.agents():
            _kill(pid, signal.SIGKILL)
        _until(lambda: not self.agents(), 10)
        shutil.rmtree(self.root, ignore_errors=True)
        for path in [*self.base.glob("diary-*"), *self.base.glob("meeting-*")]:
            path.unlink()
        self.durable = 0
        self.saved = 0

    def close(self) -> None:
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait(10)
        assert self._zygote.stdout is not None
        self._zygote.stdout.close()
        for pid in self.agents():
            _kill(pid, signal.SIGKILL)


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    _until(lambda: not _alive(group), 10)


def _alive(group: int) -> bool:
    for probe in (os.killpg, os.kill):  # a trainer that was just forked leads no group yet
        with contextlib.suppress(ProcessLookupError):
            probe(group, 0)
            return True
    return False


def _until(condition: Callable[[], Any], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.002)
    return bool(condition())


@dataclass(frozen=True)
class Kind:
    """A fault on running processes. ``action`` makes the shim act inside the agent; otherwise signals do."""

    name: str
    ranks: int = 1
    action: int = 0
    trainer: bool = False
    agent: bool = False
    stop: bool = False
    memory: bool = True


KINDS = (
    Kind("kill -9 trainer", trainer=True),
    Kind("kill -9 agent", agent=True),
    Kind("kill -9 trainer and agent", trainer=True, agent=True),
    Kind("kill -9 all of two ranks", ranks=2, trainer=True),
    Kind("kill -9 all of two ranks, no memory tier", ranks=2, trainer=True, memory=False),
    Kind("agent killed between two system calls", action=_KILL),
    Kind("agent and trainer killed between two system calls", action=_KILL_BOTH),
    Kind("two ranks and agent killed between two system calls", ranks=2, action=_KILL_BOTH),
    Kind("agent stopped between two system calls, goes on later", action=_STOP),
    Kind("agent stopped, goes on later", stop=True),
    Kind("agent's system call fails with EIO", action=_EIO),
    Kind("agent's system call fails with ENOSPC", action=_ENOSPC),
)


def try_kills(tally: Tally, *, seed: int, count: int, progress: Callable[[str], None]) -> None:
    """``count`` faults, spread over all kinds; each is followed by a load, and by a trainer that resumes."""
    rng = random.Random(f"{seed}/kills")
    base = Path(tempfile.mkdtemp(prefix="serai-kills-"))
    shim = compile_shim(base)
    kinds = [kind for kind in KINDS if shim is not None or not kind.action]
    stage = Stage(base, shim)
    try:
        for number in range(count):
            if number % (3 * len(kinds)) == 0:
                stage.clear()
            kind = kinds[number % len(kinds)]
            outcome, detail = _one(stage, kind, rng)
            tally.add(kind.name, outcome, f"number {number}: {detail}")
            if outcome in (Outcome.WRONG, Outcome.HUNG):
                progress(f"  {kind.name}: {outcome.value}: {detail[:300]}")
                stage.clear()
    finally:
        stage.clear()
        stage.close()
        shutil.rmtree(base, ignore_errors=True)


def _one(stage: Stage, kind: Kind, rng: random.Random) -> tuple[Outcome, str]:
    before = stage.durable
    group, diary = stage.start(
        ranks=kind.ranks, keep=rng.choice((1, 2)), memory=kind.memory, pause=rng.choice((0.0, 0.005, 0.03))
    )
    try:
        problem = _strike(stage, kind, rng, group, diary)
        if problem is not None:
            return problem
    finally:
        _kill_group(group)
        for pid in stage.agents():
            _kill(pid, signal.SIGCONT)
    found = stage.read(diary)
    for line in found.resumed:
        _, step, _, verdict = line.split(" ", 3)
        if verdict != "ok":
            return Outcome.WRONG, line
        if int(step) < before:
            return Outcome.WRONG, f"resumed from step {step}, but step {before} was durable"
    outcome, detail = _load(stage, max(stage.saved, found.last("S")))
    stage.saved = max(stage.saved, found.last("S"))
    return outcome, f"{detail} (began: {found.resumed}; {found.lines[-2:]})"


def _strike(
    stage: Stage, kind: Kind, rng: random.Random, group: int, diary: Path
) -> tuple[Outcome, str] | None:
    def failed() -> str:
        return stage.read(diary).failure

    if not _until(lambda: stage.read(diary).last("D") or failed() or not _alive(group), _START_S):
        return Outcome.HUNG, f"no save became durable within {_START_S:.0f} s: {stage.read(diary).lines[-3:]}"
    if failed():
        return Outcome.WRONG, f"the trainer failed before any fault: {failed()}"
    agents = stage.agents()
    if kind.action:
        stage.control.arm(rng.randrange(120), kind.action, group)
        if not _until(lambda: stage.control.fired, 20):
            stage.control.disarm()
            return Outcome.HUNG, "the agent made no calls for 20 s"
    else:
        time.sleep(rng.random() * 0.08)
        for pid in agents if kind.agent else []:
            _kill(pid, signal.SIGKILL)
        for pid in agents if kind.stop else []:
            _kill(pid, signal.SIGSTOP)
    if kind.trainer or kind.action == _KILL_BOTH:
        return None
    # The trainer lives: it has to go on, and steps have to become durable again.
    if kind.stop or kind.action == _STOP:
        time.sleep(0.5 + rng.random())
        for pid in stage.agents():
            _kill(pid, signal.SIGCONT)
    mark = stage.read(diary).last("S")
    if not _until(lambda: stage.read(diary).last("D") > mark or failed() or not _alive(group), _RECOVER_S):
        return Outcome.HUNG, f"nothing became durable again: {stage.read(diary).lines[-4:]}"
    if failed() or not _alive(group):
        return Outcome.WRONG, f"the trainer died of it: {failed()}"
    return None


def _load(stage: Stage, newest: int) -> tuple[Outcome, str]:
    """What a stranger finds on the disk right after the fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            state = serai.load(stage.root)
        except CheckpointNotFound as error:
            if stage.durable:
                return Outcome.WRONG, f"step {stage.durable} is lost: {error.message}"
            return Outcome.NEWEST, "nothing was durable"
        except SeraiError as error:
            return Outcome.WRONG, f"step {stage.durable} is lost: {error.message}"
    mark = mark_of(state)
    if isinstance(mark, str):
        return Outcome.WRONG, mark
    if mark < stage.durable:
        return Outcome.WRONG, f"step {mark} came back, step {stage.durable} was durable"
    if mark > newest:
        return Outcome.WRONG, f"step {mark} came back, which was never saved"
    return Outcome.NEWEST, f"step {mark}"
