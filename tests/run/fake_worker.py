"""A training loop without torch: the events, signals and exit codes of the real one, and state that resumes.

The loss depends on every step before it, so a wrong resume shows in it. State is one small file a save.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from serai.context import current_run
from serai.events import EventWriter

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--step-seconds", type=float, default=0.01)
parser.add_argument("--fault", default="")
parser.add_argument("--fault-rank", type=int, default=0)
parser.add_argument("--fault-step", type=int, default=7)
parser.add_argument(
    "--always", action="store_true", help="the fault strikes in every attempt, not only the first"
)
parser.add_argument("--child", action="store_true", help="start a child process that ignores SIGTERM")
parser.add_argument("--forget", action="store_true", help="resume with a wrong state")
parser.add_argument("--no-events", action="store_true")
options = parser.parse_args()

context = current_run()
assert context is not None
rank = int(os.environ["RANK"])
stopping = False


def stop(number: int, frame: object) -> None:
    global stopping
    stopping = True


signal.signal(signal.SIGTERM, stop)
print(f"rank {rank} of {os.environ['WORLD_SIZE']}, {os.environ['OMP_NUM_THREADS']} threads")
if options.child:
    subprocess.Popen(
        [sys.executable, "-c", "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    )

folder = Path(context.checkpoints)
folder.mkdir(parents=True, exist_ok=True)
events = None if options.no_events else EventWriter(
    context.run_dir / "events" / f"rank-{rank:05d}.jsonl", rank=rank, attempt=context.attempt
)  # fmt: skip


def tell(kind: str, **fields: object) -> None:
    if events is not None:
        events.write(kind, **fields)


def save(step: int, loss: float) -> None:
    temporary = folder / f".{rank}.tmp"
    temporary.write_text(json.dumps({"step": step, "loss": loss.hex()}))
    temporary.rename(folder / f"{rank}.json")
    terms = {"call_s": 0.002, "gate_s": 0.001, "inflation_s": 0.0, "back_pressure_s": 0.0, "finalise_s": 0.0}
    tell("save", step=step, generation=f"step-{step}-{context.attempt}", bytes=100, **terms)
    if rank == 0:
        tell("durable", step=step, generation=f"step-{step}-{context.attempt}", seconds_after_save=0.01)


tell(
    "start",
    world_size=int(os.environ["WORLD_SIZE"]),
    pid=os.getpid(),
    device="cpu",
    parameters=10,
    torch="none",
)
start, loss = 0, 5.0
if (folder / f"{rank}.json").exists():
    state = json.loads((folder / f"{rank}.json").read_text())
    start, loss = state["step"], float.fromhex(state["loss"]) + 1e-9 * options.forget
    tell("restored", step=start, tier="local", generation=f"step-{start}", seconds=0.001)


def strike() -> None:
    match options.fault:
        case "user":
            raise ValueError("the labels are wrong")
        case "named-nan":
            tell("error", cause="nan", message="loss is nan at step 7", traceback=None)
            sys.exit(1)
        case "disk":
            raise OSError(28, "No space left on device")
        case "memory":
            raise MemoryError("cannot allocate 8 GiB")
        case "peer":
            raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234")
        case "hang":
            time.sleep(600)
        case "oom":
            group = Path(f"/sys/fs/cgroup/memory/serai-test-{os.getpid()}")
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(48 << 20))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            hoard = [bytearray(os.urandom(1 << 20)) for _ in range(200)]
            print(len(hoard))
        case "spec":
            sys.exit(2)
        case name if name.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(600)


for step in range(start + 1, options.steps + 1):
    due = options.fault and rank == options.fault_rank and step == options.fault_step
    if due and (options.always or context.attempt == 1):
        strike()
    began = time.time()
    time.sleep(options.step_seconds)
    loss = loss * 0.95 + 0.01 * math.sin(step)
    tell("step", step=step, loss=loss, loss_hex=loss.hex(), tokens=1000, seconds=time.time() - began,
         tokens_per_s=1e5, lr=1e-3, grad_norm=1.0, data_wait_s=0.0)  # fmt: skip
    if stopping:
        save(step, loss)
        tell("stopped", step=step, reason="SIGTERM")
        sys.exit(75)
    if step % options.every == 0 or step == options.steps:
        save(step, loss)
tell("done", step=options.steps)
