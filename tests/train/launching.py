"""Start real training processes on a free port, with a deadline, and read what they reported."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from serai.data.config import DataConfig
from serai.data.prepare import Prepared, prepare
from serai.events import read_events

__all__ = ["Fault", "Job", "Workers", "end_agents", "write_texts"]

WORDS = [
    "the",
    "sailor",
    "told",
    "a",
    "long",
    "story",
    "of",
    "winter",
    "rivers",
    "and",
    "the",
    "raven",
    "who",
    "kept",
    "salt",
    "bread",
    "and",
    "candles",
    "in",
    "a",
    "harbour",
    "where",
    "every",
    "morning",
    "seven",
    "ships",
    "came",
    "home",
    "with",
    "honey",
    "silver",
    "wool",
    "and",
    "letters",
    "from",
    "far",
    "cold",
    "islands",
]


def write_texts(folder: Path, *, files: int = 10, sentences: int = 60) -> Path:
    """Little texts with words that follow each other in a pattern, so that a model can learn something."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        lines = []
        for sentence in range(sentences):
            start = (number * 7 + sentence * 3) % len(WORDS)
            picked = [WORDS[(start + step * (1 + number % 3)) % len(WORDS)] for step in range(9)]
            lines.append(" ".join(picked) + f" number {number * 100 + sentence}.")
        (folder / f"tale-{number:02d}.txt").write_text("\n".join(lines) + "\n")
    return folder


@dataclass
class Job:
    """A tiny native job in a workspace of its own; ``overrides`` are merged into its sections."""

    workspace: Path
    name: str = "tiny"
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.workspace / "runs" / self.name

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "name": self.name,
            "model": {"preset": "tiny", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64},
            "data": {
                "text": [str(self.workspace / "texts")],
                "seq_len": 16,
                "validation_fraction": 0.2,
                "tokenizer": {"vocab_size": 320},
            },
            "train": {
                "steps": 8,
                "micro_batch": 4,
                "learning_rate": 5e-3,
                "warmup_steps": 2,
                "evaluate_every": 4,
                "evaluate_rows": 12,
                "collective_timeout_s": 30.0,
            },
            "parallel": {"strategy": "ddp"},
            "checkpoint": {"every": 2},
            "resources": {"processes": 2, "device": "cpu"},
            "retry": {"stop_grace_s": 60.0},
        }
        for section, values in self.overrides.items():
            document[section] = {**document[section], **values}
        return document

    def prepare(self) -> Prepared:
        """Write the texts, the pack and ``resolved.json``."""
        if not (self.workspace / "texts").exists():
            write_texts(self.workspace / "texts")
        document = self.document()
        prepared = prepare(
            DataConfig.from_stored(document["data"]),
            cache=self.workspace / "cache",
            seed=int(document["train"].get("seed", 1)),
        )
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "resolved.json").write_text(json.dumps(document))
        prepared.save(self.run_dir / "prepared.json")
        return prepared

    def environment(self) -> dict[str, str]:
        """Variables of a worker: its run, and a folder of the workspace for the sockets of agents."""
        sockets = self.workspace / "run"
        sockets.mkdir(mode=0o700, exist_ok=True)
        return {"SERAI_RUN_DIR": str(self.run_dir), "XDG_RUNTIME_DIR": str(sockets), "OMP_NUM_THREADS": "1"}

    def events(self, kind: str, *, rank: int = 0) -> list[dict[str, Any]]:
        return list(read_events(self.run_dir / "events" / f"rank-{rank:05d}.jsonl", kind=kind))

    def losses(self) -> dict[int, str]:
        """Step → loss as a hexadecimal float; of a step that was made twice, the later."""
        return {event["step"]: event["loss_hex"] for event in self.events("step")}

    def loss_values(self) -> list[float]:
        return [float.fromhex(loss) for _, loss in sorted(self.losses().items())]

    def run(
        self,
        *,
        processes: int = 2,
        attempt: int = 1,
        timeout: float = 90.0,
        cold: bool = False,
        fault: Fault | None = None,
    ) -> list[int]:
        """Train until every rank has ended; returns their exit codes, negative for a signal."""
        with Workers.start(self, processes=processes, attempt=attempt, cold=cold, fault=fault) as workers:
            return workers.wait(timeout=timeout)


def end_agents(workspace: Path) -> None:
    """Kill the checkpoint agents that jobs of a workspace have left behind (each would wait ten minutes)."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "--ready" in command and any(str(workspace / "run") in part for part in command):
            process.kill()


@dataclass(frozen=True)
class Fault:
    """A statement that ``ranks`` run at the end of training pass ``at_pass`` (from 1; 0: before set-up)."""

    statement: str
    at_pass: int
    ranks: tuple[int, ...] = (1,)

    @classmethod
    def signal(cls, name: str, *, at_pass: int, ranks: tuple[int, ...] = (1,)) -> Fault:
        """The process sends itself a signal: a kill, a stop or a hang at a known place."""
        return cls(f"os.kill(os.getpid(), signal.{name})", at_pass, ranks)


@dataclass
class Workers:
    """Worker processes of one attempt, ended when the block is left.

    They are forked from a server that has torch and transformers imported already, which saves five seconds
    of CPU each; ``cold`` starts them as torchrun does instead, by ``python -m serai.train.worker``.
    """

    job: Job
    processes: list[Worker]
    logs: list[Path]

    @classmethod
    @contextmanager
    def start(
        cls,
        job: Job,
        *,
        processes: int = 2,
        attempt: int = 1,
        cold: bool = False,
        fault: Fault | None = None,
    ) -> Iterator[Workers]:
        """Start ``processes`` ranks, the forked ones with a fault planted if one is given."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started: list[Worker] = []
        logs = []
        for rank in range(processes):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "SERAI_ATTEMPT": str(attempt),
                **job.environment(),
            }
            logs.append(job.run_dir / f"attempt-{attempt}-rank-{rank}.log")
            resolved = str(job.run_dir / "resolved.json")
            if cold:
                started.append(_Cold(resolved, environment, logs[-1]))
            else:
                started.append(
                    _Forked(resolved, environment, logs[-1], fault if fault and rank in fault.ranks else None)
                )
        try:
            yield cls(job, started, logs)
        finally:
            for process in started:
                process.signal(signal.SIGKILL)
                process.join(30.0)

    def wait(self, *, timeout: float = 90.0) -> list[int]:
        """Exit codes, negative for a signal; fails with the logs when the time is up."""
        deadline = time.monotonic() + timeout
        codes = [process.join(max(deadline - time.monotonic(), 0.01)) for process in self.processes]
        if None in codes:
            raise AssertionError(f"workers still run after {timeout} s: {codes}\n{self.output()}")
        return [code for code in codes if code is not None]

    def output(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.logs)


class Worker(Protocol):
    """One process: ``join`` gives its exit code, or ``None`` when the time is up."""

    def join(self, timeout: float) -> int | None: ...
    def signal(self, number: int) -> None: ...


class _Cold:
    def __init__(self, resolved: str, environment: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "serai.train.worker", resolved],
                env={**os.environ, **environment},
                stdout=stream,
                stderr=stream,
            )

    def join(self, timeout: float) -> int | None:
        try:
            return self._process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: int) -> None:
        self._process.send_signal(number)


_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "transformers.models.llama.modeling_llama",
        "serai.train.loop",
        "serai.train.parallel.ddp",
        "serai.train.parallel.fsdp2",
        "serai.checkpoint.checkpointer",
    ]
)


class _Forked:
    def __init__(self, resolved: str, environment: dict[str, str], log: Path, fault: Fault | None) -> None:
        self._process = _SERVER.Process(target=_work, args=(resolved, environment, str(log), fault))
        self._process.start()

    def join(self, timeout: float) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def signal(self, number: int) -> None:
        if self._process.pid is not None and self._process.exitcode is None:
            os.kill(self._process.pid, number)


def _work(resolved: str, environment: dict[str, str], log: str, fault: Fault | None) -> None:
    """A forked worker: torchrun's environment, a log of its own, then what ``python -m`` would run."""
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from serai.train import worker

    if fault:
        _plant(fault)
    sys.exit(worker.main([resolved]))


def _plant(fault: Fault) -> None:
    import torch

    from serai.train import loop

    module: Any = loop
    original, build, passes = module.sum_of_losses, module.build_model, 0
    names = {"torch": torch, "os": os, "signal": signal}

    def faulty_build(config: Any) -> Any:
        exec(fault.statement, names)
        return build(config)

    def faulty(model: Any, inputs: Any, labels: Any) -> Any:
        nonlocal passes
        loss = original(model, inputs, labels)
        passes += model.training
        if model.training and passes == fault.at_pass:
            found: dict[str, Any] = {"loss": loss}
            exec(fault.statement, names, found)
            return found["loss"]
        return loss

    if fault.at_pass == 0:
        module.build_model = faulty_build
    else:
        module.sum_of_losses = faulty
