"""Start real training processes on a free port, with a deadline, and read what they reported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serai.data.config import DataConfig
from serai.data.prepare import Prepared, prepare
from serai.events import read_events

__all__ = ["Job", "Workers", "write_texts"]

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

    def events(self, kind: str, *, rank: int = 0) -> list[dict[str, Any]]:
        return list(read_events(self.run_dir / "events" / f"rank-{rank:05d}.jsonl", kind=kind))

    def losses(self) -> dict[int, str]:
        """Step → loss as a hexadecimal float; of a step that was made twice, the later."""
        return {event["step"]: event["loss_hex"] for event in self.events("step")}

    def loss_values(self) -> list[float]:
        return [float.fromhex(loss) for _, loss in sorted(self.losses().items())]

    def run(self, *, processes: int = 2, attempt: int = 1, timeout: float = 90.0) -> list[int]:
        """Train to the end; returns the exit code of each rank."""
        with Workers.start(self, processes=processes, attempt=attempt) as workers:
            return workers.wait(timeout=timeout)


@dataclass
class Workers:
    """Worker processes of one attempt, ended when the block is left."""

    job: Job
    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]

    @classmethod
    @contextmanager
    def start(
        cls,
        job: Job,
        *,
        processes: int = 2,
        attempt: int = 1,
        module: tuple[str, ...] = ("-m", "serai.train.worker"),
    ) -> Iterator[Workers]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started, logs = [], []
        for rank in range(processes):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "SERAI_RUN_DIR": str(job.run_dir),
                "SERAI_ATTEMPT": str(attempt),
            }
            logs.append(job.run_dir / f"attempt-{attempt}-rank-{rank}.log")
            with logs[-1].open("wb") as log:
                started.append(
                    subprocess.Popen(
                        [sys.executable, *module, str(job.run_dir / "resolved.json")],
                        env=environment,
                        stdout=log,
                        stderr=log,
                    )
                )
        try:
            yield cls(job, started, logs)
        finally:
            for process in started:
                process.kill()
                process.wait(timeout=30)

    def wait(self, *, timeout: float = 90.0) -> list[int]:
        """Exit codes, negative for a signal; fails with the logs when the time is up."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            try:
                process.wait(timeout=max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"workers still run after {timeout} s\n{self.output()}") from None
        return [int(process.returncode) for process in self.processes]

    def wait_until(self, condition: Callable[[], bool], *, what: str, timeout: float = 60.0) -> None:
        """Poll until ``condition`` holds; fails when the time is up or a worker has ended before."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {timeout} s\n{self.output()}")
            if any(process.poll() is not None for process in self.processes) and not condition():
                raise AssertionError(f"{what}: a worker ended before\n{self.output()}")
            time.sleep(0.002)

    def output(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.logs)
