"""The main job on this machine: train on real text, kill -9 one process on the way, resume, report.

    make demo            # or: .venv/bin/python scripts/demo.py

Runs ``examples/demo.yaml`` in the workspace ``demo/``. The corpus and its tokens stay in ``demo/cache``; the
run itself starts anew each time. Fails when a loss after the resume differs from the one before the kill in a
single bit, or when the model has not learnt more than the frequencies of the tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from serai.events import read_events
from serai.run.workspace import Run, Workspace
from serai.units import format_duration

ROOT = Path(__file__).parents[1]
WORKSPACE = ROOT / "demo"
JOB = ROOT / "examples/demo.yaml"
VICTIM = 1
KILL_AFTER = 60  # a checkpoint of this step or later must be durable first ...
STEPS_LATER = 10  # ... and so many steps done since the newest save: they are what the resume repeats
LONGEST = 30 * 60.0
LEARNT = 0.5  # nats by which the validation loss is below the unigram entropy, at least


def main() -> int:
    forget_the_last_demo()
    command = [sys.executable, "-m", "serai", "--workspace", str(WORKSPACE), "run", str(JOB)]
    began = time.monotonic()
    supervisor = subprocess.Popen(command)
    try:
        killed_at = kill_one_rank(supervisor, began + LONGEST)
        code = supervisor.wait(max(1.0, began + LONGEST - time.monotonic()))
    finally:
        if supervisor.poll() is None:
            supervisor.terminate()
            supervisor.wait(60)
    if code != 0 or killed_at is None:
        print(f"demo: the run ended with {code}" + ("" if killed_at else " before anything was killed"))
        return code or 1
    return tell(find_run(), killed_at, time.monotonic() - began)


def forget_the_last_demo() -> None:
    """Remove the run of an earlier demo, unless it is still going on (that raises S502)."""
    found = Workspace(WORKSPACE).by_name("demo") if WORKSPACE.exists() else None
    if found is not None:
        with found.lock():
            shutil.rmtree(found.path)


def find_run() -> Run:
    found = Workspace(WORKSPACE).by_name("demo")
    assert found is not None
    return found


def kill_one_rank(supervisor: subprocess.Popen[bytes], limit: float) -> int | None:
    """kill -9 rank 1 in the middle of training; the step that rank 0 had reached, ``None`` if it never came."""
    while supervisor.poll() is None and time.monotonic() < limit:
        time.sleep(0.1)
        found = Workspace(WORKSPACE).by_name("demo") if WORKSPACE.exists() else None
        if found is None:
            continue
        newest = {e["kind"]: e["step"] for e in read_events(found.rank_events(0)) if "step" in e}
        saved = newest.get("save", 0)
        if newest.get("durable", 0) < KILL_AFTER or newest.get("step", 0) < saved + STEPS_LATER:
            continue
        victim = [e["pid"] for e in read_events(found.rank_events(VICTIM), kind="start")][-1]
        print(f"\ndemo: kill -9 {victim} (rank {VICTIM}) after step {newest['step']}\n", flush=True)
        os.kill(victim, signal.SIGKILL)
        return int(newest["step"])
    return None


def tell(run: Run, killed_at: int, seconds: float) -> int:
    """Print what the demo shows; 0 when it shows what it promises."""
    report: dict[str, Any] = json.loads(run.report_json.read_text())
    progress = report["progress"]
    resume = next(entry for entry in report["attempts"] if entry["restored_step"] is not None)

    losses: dict[int, list[str]] = defaultdict(list)
    for event in read_events(run.rank_events(0), kind="step"):
        losses[event["step"]].append(event["loss_hex"])
    repeated = {step: values for step, values in losses.items() if len(values) > 1}
    different = [step for step, values in repeated.items() if len(set(values)) > 1]
    validation, entropy = progress["validation_loss"], progress["unigram_entropy"]
    learnt = validation <= entropy - LEARNT

    print(
        f"\ndemo: {format_duration(seconds)} on {report['environment']['cpus']} cores, "
        f"{report['environment']['parameters']:,} parameters, {progress['tokens']:,} tokens\n"
        f"  learnt    validation loss {validation:.4f} nats a token, unigram entropy {entropy:.4f}"
        f" ({'clearly below it' if learnt else 'NOT clearly below it'})\n"
        f"  killed    rank {VICTIM} with SIGKILL after step {killed_at}\n"
        f"  resumed   from step {resume['restored_step']} ({resume['tier']}), restored in "
        f"{format_duration(resume['restore_s'])}\n"
        f"  proved    {len(repeated)} steps ran twice, before and after; losses "
        + (f"DIFFER at steps {different}" if different else "identical to the last bit")
        + f"\n  report    {run.report_html}"
    )
    return 0 if learnt and repeated and not different else 1


if __name__ == "__main__":
    sys.exit(main())
