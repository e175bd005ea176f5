"""Predicted against measured on this host's CPUs: real steps of this stack's trainer, calibrated and judged.

    python scripts/plan_cpu.py --out DIR [--rounds 20]

Calibration layouts and judged layouts are trained step by step in turn, in the same processes, so that
whatever else the machine does hits all of them alike; medians count. Three constants are fitted to the
calibration layouts (and, for two processes, three more starting from those), then the judged ones are
predicted. Peak memory is each layout's own process, measured by the kernel (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

#: name → (processes, calibration?, model, seq_len, micro_batch, grad_accumulation, strategy)
LAYOUTS: dict[str, tuple[int, bool, dict[str, Any], int, int, int, str]] = {
    "cal-narrow": (1, True, {"preset": "tiny"}, 128, 4, 1, "ddp"),
    "cal-wide": (1, True, {"preset": "tiny", "hidden": 384, "heads": 6, "kv_heads": 3, "ffn": 1024}, 128, 4, 1, "ddp"),
    "cal-long": (1, True, {"preset": "tiny", "layers": 2, "hidden": 256, "ffn": 704}, 512, 2, 1, "ddp"),
    "cal-short": (1, True, {"preset": "tiny", "layers": 8}, 64, 2, 1, "ddp"),
    "tiny": (1, False, {"preset": "tiny"}, 256, 4, 1, "ddp"),
    "tiny-accumulate": (1, False, {"preset": "tiny"}, 128, 4, 3, "ddp"),
    "small": (1, False, {"preset": "small"}, 128, 2, 1, "ddp"),
    "deep": (1, False, {"preset": "tiny", "layers": 12}, 128, 4, 1, "ddp"),
    "wide": (1, False, {"preset": "tiny", "layers": 2, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1408}, 128, 4, 1, "ddp"),
    "long": (1, False, {"preset": "tiny"}, 512, 2, 1, "ddp"),
    "cal-two-ddp": (2, True, {"preset": "tiny"}, 128, 4, 1, "ddp"),
    "cal-two-fsdp": (2, True, {"preset": "tiny", "hidden": 384, "heads": 6, "kv_heads": 3, "ffn": 1024}, 128, 4, 1, "fsdp2"),
    "cal-two-deep": (2, True, {"preset": "tiny", "layers": 8}, 64, 4, 1, "fsdp2"),
    "two-ddp": (2, False, {"preset": "tiny", "layers": 6, "hidden": 256, "ffn": 704}, 128, 4, 1, "ddp"),
    "two-fsdp": (2, False, {"preset": "tiny", "layers": 6, "hidden": 256, "ffn": 704}, 128, 4, 1, "fsdp2"),
    "two-fsdp-long": (2, False, {"preset": "tiny"}, 512, 2, 1, "fsdp2"),
    "two-fsdp-small": (2, False, {"preset": "small"}, 64, 4, 1, "fsdp2"),
}  # fmt: skip
VOCAB = 1024


def job_document(name: str) -> dict[str, Any]:
    processes, _, model, seq, micro, accum, strategy = LAYOUTS[name]
    return {
        "serai": 1,
        "name": name,
        "model": {"family": "llama", **model},
        "data": {"text": ["text"], "seq_len": seq, "tokenizer": {"vocab_size": VOCAB}},
        "train": {"steps": 100_000, "micro_batch": micro, "grad_accumulation": accum, "evaluate_every": None},
        "parallel": {"strategy": strategy},
        "resources": {"processes": processes, "device": "cpu", "threads": 1},
    }


class _NoCheckpoints:
    """Steps are timed here, not saves."""

    last_durable = None

    def restore(self, *_: Any, **__: Any) -> None:
        return None

    def save(self, *_: Any, **__: Any) -> None:
        return None

    def close(self, *_: Any, **__: Any) -> None:
        return None


def _trainer(folder: Path, name: str) -> Any:
    import torch

    from serai.data.pack import open_pack
    from serai.data.prepare import prepare
    from serai.events import EventWriter
    from serai.spec import resolve
    from serai.train.job import TrainJob
    from serai.train.launched import Launched
    from serai.train.loop import Trainer
    from serai.train.reporting import Reporter
    from serai.train.signals import StopFlag

    place = folder / name
    spec = resolve(str(place / "job.yaml"))
    (place / "resolved.json").write_text(json.dumps(spec.to_json()))
    job = TrainJob.read(place / "resolved.json")
    prepared = prepare(job.data, cache=folder / "cache", seed=job.train.seed)
    launched = Launched.from_environment()
    return Trainer(
        job,
        pack=open_pack(prepared.manifest),
        launched=launched,
        device=torch.device("cpu"),
        reporter=Reporter(EventWriter(place / f"rank-{launched.rank}.jsonl"), rank=launched.rank),
        checkpointer=_NoCheckpoints,
        stop=StopFlag(),
        grace_s=1.0,
    )


def _step(trainer: Any) -> float:
    started = time.perf_counter()
    batch = trainer.loader.next()
    trainer.agree(batch, trainer.forward_and_backward(batch))
    trainer.update()
    return time.perf_counter() - started


def worker(folder: Path, names: list[str], rounds: int) -> None:
    """Train ``names`` in turn; rank 0 writes seconds of every step and this process's peak memory."""
    import torch

    from serai.train.launched import Launched
    from serai.train.processes import join

    torch.set_num_threads(1)
    launched = Launched.from_environment()
    join(launched, torch.device("cpu"), timeout_s=600)
    trainers = {name: _trainer(folder, name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 3):
        for name, trainer in trainers.items():
            value = _step(trainer)
            if turn >= 3:
                seconds[name].append(value)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024 / 1e9
    if launched.rank == 0:
        (
            folder / f"out-{'+'.join(names) if len(names) == 1 else len(names)}-{launched.world}.json"
        ).write_text(json.dumps({"seconds": seconds, "peak_gb": peak}))
    import torch.distributed as dist

    dist.barrier()
    os._exit(0)


def _launch(folder: Path, names: list[str], rounds: int, world: int, port: int) -> dict[str, Any]:
    label = names[0] if len(names) == 1 else str(len(names))
    kept = folder / f"out-{label}-{world}.json"
    if kept.exists():  # measured before: only fit and predict again
        return dict(json.loads(kept.read_text()))
    workers = []
    for rank in range(world):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}  # fmt: skip
        command = [
            sys.executable,
            __file__,
            "--out",
            str(folder),
            "--rounds",
            str(rounds),
            "--worker",
            *names,
        ]
        workers.append(subprocess.Popen(command, env=environment))
    for process in workers:
        if process.wait(timeout=1800):
            raise SystemExit(f"a worker of {names} failed")
    return dict(json.loads(kept.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--text", type=Path, help="folder of text files to train on")
    parser.add_argument("--worker", nargs="+")
    given = parser.parse_args()
    if given.worker:
        worker(given.out, given.worker, given.rounds)
        return 0
    return compare(given.out, given.text, given.rounds)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compare(folder: Path, text: Path, rounds: int) -> int:
    """Measure, calibrate, predict, print the table, write ``plan_cpu.json``."""
    import yaml

    from serai.data.prepare import prepare
    from serai.plan.calibrate import Measured, calibrate
    from serai.plan.feedback import job_cluster, job_layout, job_model
    from serai.plan.predict import predict
    from serai.plan.profiles import load_profile
    from serai.spec import resolve
    from serai.train.config import ModelConfig

    folder.mkdir(parents=True, exist_ok=True)
    runs: dict[str, Measured] = {}
    for name in LAYOUTS:
        document = job_document(name)
        document["data"]["text"] = [str(text.absolute())]
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "job.yaml").write_text(yaml.safe_dump(document))
        data = resolve(str(folder / name / "job.yaml")).document.data
        assert data is not None
        prepare(data, cache=folder / "cache", seed=1)
    seconds: dict[str, list[float]] = {}
    for world in (1, 2):
        names = [name for name, layout in LAYOUTS.items() if layout[0] == world]
        seconds.update(_launch(folder, names, rounds, world, _free_port())["seconds"])
    for name, layout in LAYOUTS.items():
        resolved = resolve(str(folder / name / "job.yaml")).to_json()
        shape = asdict(ModelConfig.model_validate(resolved["model"]).shape())
        peak = _launch(folder, [name], 2, layout[0], _free_port())["peak_gb"]
        runs[name] = Measured(
            job_model(shape, VOCAB), job_cluster(resolved), job_layout(resolved), tuple(seconds[name]), peak
        )
    base = load_profile("default")
    one = calibrate(
        [run for name, run in runs.items() if name.startswith("cal-") and LAYOUTS[name][0] == 1], base
    )
    two = calibrate([run for name, run in runs.items() if name.startswith("cal-two")], one)
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        profile = one if LAYOUTS[name][0] == 1 else two
        p = predict(run.model, run.cluster, run.layout, profile=profile)
        assert run.peak_gb is not None
        low, high = p.step_time_interval_s
        rows.append({
            "layout": name, "calibration": LAYOUTS[name][1], "measured_s": run.step_time_s, "predicted_s": p.step_time_s,
            "error": p.step_time_s / run.step_time_s - 1, "inside": low <= run.step_time_s <= high,
            "measured_gb": run.peak_gb, "predicted_gb": p.memory_gb, "memory_error": p.memory_gb / run.peak_gb - 1,
        })  # fmt: skip
    for row in rows:
        print(f"{row['layout']:18} {row['measured_s'] * 1e3:9.1f} ms {row['predicted_s'] * 1e3:9.1f} ms {row['error']:+7.1%}   {row['measured_gb']:6.3f} GB {row['predicted_gb']:6.3f} GB {row['memory_error']:+7.1%}{'   (calibration)' if row['calibration'] else ''}")  # fmt: skip
    judged = [row for row in rows if not row["calibration"]]
    time_error = median(abs(row["error"]) for row in judged)
    memory_error = median(abs(row["memory_error"]) for row in judged)
    mean_time = sum(abs(row["error"]) for row in judged) / len(judged)
    print(f"{len(judged)} judged layouts: |step time error| mean {mean_time:.1%}, median {time_error:.1%}, worst {max(abs(r['error']) for r in judged):.1%}; |memory error| median {memory_error:.1%}, worst {max(abs(r['memory_error']) for r in judged):.1%}; {sum(r['inside'] for r in judged)} inside the 80 % interval")  # fmt: skip
    (folder / "plan_cpu.json").write_text(json.dumps({"rows": rows, "constants": {"one": one.constants.as_dict(), "two": two.constants.as_dict()}}, indent=1))  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
