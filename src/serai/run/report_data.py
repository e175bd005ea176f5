"""What a run's events add up to: one plain document, the source of ``report.json``, ``report.html`` and the summary.

Only events are read, so a report can be made of a run that is alive, failed, or was killed with -9.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from serai.events import read_events
from serai.run.predicted import predicted
from serai.run.workspace import Run

__all__ = ["STALL_TERMS", "collect"]

STALL_TERMS = ("call_s", "gate_s", "inflation_s", "back_pressure_s", "finalise_s")
_PACKAGES = (
    "serai",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "xxhash",
    "obstore",
)


def collect(run: Run, *, ending: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The report of a run as a JSON document. Times are seconds, losses nats a token, sizes bytes.

    ``ending``: fields of ``run.json`` that its supervisor knows, whether or not it could still write them.
    """
    state = {**run.state(), **(ending or {})}
    supervisor = list(run.events())
    rank_zero = list(read_events(run.rank_events(0)))
    steps, lost_s, lost_steps = _final_steps(event for event in rank_zero if event["kind"] == "step")
    evaluations = _last_of_each_step(event for event in rank_zero if event["kind"] == "evaluation")
    prepared: dict[str, Any] = next(
        (event for event in reversed(supervisor) if event["kind"] == "prepared"), {}
    )
    start: dict[str, Any] = next((event for event in reversed(rank_zero) if event["kind"] == "start"), {})
    checkpoints = _checkpoints(run)
    if not steps:
        steps, checkpoints = _of_a_script(supervisor, checkpoints)
    durable = [entry["step"] for entry in checkpoints if entry["durable"]]
    return {
        "schema_version": 1,
        "run": {
            **{
                key: state.get(key)
                for key in ("id", "name", "status", "exit_code", "created", "host", "attempts", "note")
            },
            "path": str(run.path),
            "job_file": state.get("job_file"),
            "command": state.get("command") or f"serai run {state.get('job_file') or 'job.yaml'}",
            "seconds": _active_seconds(supervisor),
            "written": time.time(),
        },
        "progress": {
            "last_step": steps[-1]["step"] if steps else None,
            "total_steps": (run.resolved().get("train") or {}).get("steps"),
            "last_durable_step": max(durable, default=state.get("durable_step")),
            "tokens": sum(int(event.get("tokens") or 0) for event in steps),
            "final_loss": steps[-1].get("loss") if steps else None,
            "final_loss_hex": steps[-1].get("loss_hex") if steps else None,
            "validation_loss": evaluations[-1]["loss"] if evaluations else None,
            "unigram_entropy": prepared.get("unigram_entropy"),
            "tokens_per_s": _median(event.get("tokens_per_s") for event in steps),
            "step_s": _median(event.get("seconds") for event in steps),
            "repeated_steps": lost_steps,
        },
        "steps": [
            {
                key: event.get(key)
                for key in (
                    "step",
                    "loss",
                    "tokens_per_s",
                    "seconds",
                    "data_wait_s",
                    "lr",
                    "grad_norm",
                    "attempt",
                )
            }
            for event in steps
        ],
        "evaluations": [{"step": event["step"], "loss": event["loss"]} for event in evaluations],
        "predicted": predicted(run.resolved(), start, steps, run.path.parent.parent),
        "time": _time(supervisor, rank_zero, steps, lost_s, checkpoints),
        "checkpoints": checkpoints,
        "attempts": _attempts(supervisor, rank_zero),
        "failure": state.get("failure"),
        "prepared": {key: value for key, value in prepared.items() if key not in ("time", "kind")},
        "environment": _environment(start),
        "spec": run.resolved(),
        "spec_text": _text(run.spec_path),
    }


def _final_steps(events: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], float, int]:
    """Each step's last execution in order, and the seconds and number of executions that a resume repeated."""
    latest: dict[int, dict[str, Any]] = {}
    lost_s, lost = 0.0, 0
    for event in events:
        before = latest.get(event["step"])
        if before is not None:
            lost += 1
            lost_s += float(before.get("seconds") or 0.0)
        latest[event["step"]] = event
    return [latest[step] for step in sorted(latest)], lost_s, lost


def _last_of_each_step(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    latest = {event["step"]: event for event in events}
    return [latest[step] for step in sorted(latest)]


def _checkpoints(run: Run) -> list[dict[str, Any]]:
    """One entry a generation: the five stall terms (the slowest rank's), bytes over all ranks, when durable."""
    found: dict[str, dict[str, Any]] = {}
    for path in run.rank_event_files().values():
        for event in read_events(path):
            if event["kind"] not in ("save", "durable"):
                continue
            key = str(event.get("generation") or f"{event['step']}/{event.get('attempt')}")
            entry = found.setdefault(
                key,
                {"step": event["step"], "generation": event.get("generation"), "attempt": event.get("attempt"),
                 "time": event["time"], "bytes": 0, "durable_s": None, "durable": False, **dict.fromkeys(STALL_TERMS, 0.0)},
            )  # fmt: skip
            # Inflation and finalise are known only once it is durable, so both kinds carry the terms.
            for term in STALL_TERMS:
                entry[term] = max(entry[term], float(event.get(term) or 0.0))
            if event["kind"] == "durable":
                entry["durable"] = True
                entry["durable_s"] = event.get("seconds_after_save")
            else:
                entry["bytes"] += int(event.get("bytes") or 0)
    return sorted(found.values(), key=lambda entry: float(entry["time"]))


def _of_a_script(
    supervisor: list[dict[str, Any]], checkpoints: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What is known of a script that writes no events: the checkpoints that became durable, and their losses."""
    seen = _last_of_each_step(event for event in supervisor if event["kind"] == "durable")
    steps = [
        {"step": event["step"], "loss": event["loss"]} for event in seen if event.get("loss") is not None
    ]
    if not checkpoints:
        checkpoints = [
            {"step": event["step"], "generation": event["generation"], "attempt": None, "time": event["time"],
             "bytes": event["bytes"], "durable_s": None, "durable": True, **dict.fromkeys(STALL_TERMS, 0.0)}
            for event in seen
        ]  # fmt: skip
    return steps, checkpoints


def _attempts(supervisor: list[dict[str, Any]], rank_zero: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How each attempt began (what it restored, from which tier), ended, and what that cost."""
    attempts: dict[int, dict[str, Any]] = {}
    for event in supervisor:
        number = int(event.get("attempt") or 0)
        if event["kind"] == "attempt_started":
            attempts[number] = {"attempt": number, "started": event["time"], "ended": None, "status": "interrupted",
                                "cause": None, "first_failing_rank": None, "message": None, "last_step": None,
                                "restored_step": None, "tier": None, "restore_s": None, "first_step_s": None,
                                "repeated_steps": 0}  # fmt: skip
        elif event["kind"] == "attempt_ended" and number in attempts:
            attempts[number].update(
                {
                    key: event.get(key)
                    for key in ("status", "cause", "first_failing_rank", "message", "last_step")
                },
                ended=event["time"],
            )
    seen: set[int] = set()
    for event in rank_zero:
        entry = attempts.get(int(event.get("attempt") or 0))
        if entry is None:
            continue
        if event["kind"] == "restored":
            entry.update(
                restored_step=event.get("step"), tier=event.get("tier"), restore_s=event.get("seconds")
            )
        elif event["kind"] == "step":
            entry["last_step"] = event["step"]
            if entry["first_step_s"] is None:
                entry["first_step_s"] = event["time"] - entry["started"]
            entry["repeated_steps"] += event["step"] in seen
            seen.add(event["step"])
    return [attempts[number] for number in sorted(attempts)]


def _time(
    supervisor: list[dict[str, Any]],
    rank_zero: list[dict[str, Any]],
    steps: list[dict[str, Any]],
    lost_s: float,
    checkpoints: list[dict[str, Any]],
) -> dict[str, float]:
    """Where the run's active time went, in seconds, as parts that add up to the whole.

    compute: steps that count, without waiting for data. repeated: steps that a resume ran again. restart:
    from a failure to the first step after it (start: the same for each supervisor's first attempt). other:
    what is left: logging, the last save, the end.
    """
    total = _active_seconds(supervisor)
    wait = sum(float(event.get("data_wait_s") or 0.0) for event in steps)
    compute = sum(float(event.get("seconds") or 0.0) for event in steps) - wait
    stall = sum(sum(entry[term] for term in STALL_TERMS if term != "inflation_s") for entry in checkpoints)
    prepare = sum(float(event.get("seconds") or 0.0) for event in supervisor if event["kind"] == "prepared")
    evaluate = sum(float(event.get("seconds") or 0.0) for event in rank_zero if event["kind"] == "evaluation")
    first_steps: dict[int, float] = {}
    for event in rank_zero:
        if event["kind"] == "step":
            first_steps.setdefault(
                int(event.get("attempt") or 0), event["time"] - float(event.get("seconds") or 0.0)
            )
    start = restart = 0.0
    since: float | None = None
    failed = False
    for event in supervisor:
        match event["kind"]:
            case "run_started":
                since, failed = None, False
            case "attempt_started":
                begun = since if since is not None else event["time"]
                ready = first_steps.get(int(event["attempt"]))
                if ready is not None:
                    if failed:
                        restart += max(0.0, ready - begun)
                    else:
                        start += max(0.0, ready - begun)
            case "attempt_ended":
                since, failed = event["time"], True
    parts = {
        "compute": max(0.0, compute),
        "data_wait": wait,
        "checkpoint_stall": stall,
        "evaluate": evaluate,
        "repeated": lost_s,
        "restart": restart,
        "start": start,
        "prepare": prepare,
    }
    return {**parts, "other": max(0.0, total - sum(parts.values())), "total": total}


def _active_seconds(supervisor: list[dict[str, Any]]) -> float:
    """Seconds during which a supervisor was at work; one that was killed counts until its last event."""
    total, begun, last = 0.0, None, 0.0
    for event in supervisor:
        if event["kind"] == "run_started":
            if begun is not None:
                total += last - begun
            begun = event["time"]
        elif event["kind"] == "run_ended" and begun is not None:
            total += event["time"] - begun
            begun = None
        last = event["time"]
    return total + (last - begun if begun is not None else 0.0)


def _median(values: Iterable[Any]) -> float | None:
    numbers = [float(value) for value in values if isinstance(value, (int, float))]
    return statistics.median(numbers) if numbers else None


def _environment(start: dict[str, Any]) -> dict[str, Any]:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": _processor() or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory(),
        "device": start.get("device"),
        "world_size": start.get("world_size"),
        "parameters": start.get("parameters"),
        "torch": start.get("torch"),
        "packages": packages,
    }


def _processor() -> str | None:
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None


def _memory() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
