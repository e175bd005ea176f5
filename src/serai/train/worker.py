"""One training process: ``python -m serai.train.worker RESOLVED_JSON``, started by torchrun's agent.

Exit codes: 0 done, 75 stopped on request with the state saved, 1 failed (an ``error`` event says why), 130 on
a second Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from serai.context import RunContext, current_run
from serai.errors import SeraiError, SpecError, StoppedEarly, StorageFull, TrainingError
from serai.events import EventWriter
from serai.train.launched import Launched
from serai.train.signals import StopFlag

if TYPE_CHECKING:
    from serai.data.pack import Pack
    from serai.train.job import TrainJob
    from serai.train.saving import CheckpointerLike

__all__ = ["explain", "main"]


def main(arguments: list[str] | None = None) -> int:
    (resolved,) = sys.argv[1:] if arguments is None else arguments
    stop = StopFlag()
    stop.listen()
    path = Path(resolved)
    context = current_run() or RunContext(
        run_dir=path.parent, attempt=1, checkpoints=str(path.parent / "checkpoints")
    )
    launched = Launched.from_environment()
    name = f"rank-{launched.rank:05d}.jsonl"
    with EventWriter(
        context.run_dir / "events" / name, rank=launched.rank, attempt=context.attempt
    ) as events:
        try:
            return _work(path, context, launched, events, stop)
        except KeyboardInterrupt:
            events.write("error", cause="killed", message="interrupted by a second Ctrl-C", traceback="")
            os._exit(130)
        except BaseException as error:
            failure, cause = explain(error)
            events.write("error", cause=cause, message=str(failure), traceback=traceback.format_exc())
            traceback.print_exc()
            sys.stderr.flush()
            sys.stdout.flush()
    # Not the ordinary way out: tearing down a process group whose peers are gone can block for minutes.
    os._exit(1)


def _work(path: Path, context: RunContext, launched: Launched, events: EventWriter, stop: StopFlag) -> int:
    from serai.train.job import TrainJob

    job = TrainJob.read(path)
    pack = _open_data(job, context)

    import torch.distributed as dist

    from serai.train.loop import Trainer
    from serai.train.processes import choose_device, join, make_deterministic
    from serai.train.reporting import Reporter

    device = choose_device(job.device, launched)
    make_deterministic(device)
    join(launched, device, timeout_s=job.train.collective_timeout_s)
    trainer = Trainer(
        job,
        pack=pack,
        launched=launched,
        device=device,
        reporter=Reporter(events, rank=launched.rank),
        checkpointer=lambda: _checkpointer(job, context),
        stop=stop,
        # A little less than the supervisor waits, so that the reason is told before the kill.
        grace_s=0.9 * job.stop_grace_s,
    )
    outcome = trainer.train()
    dist.destroy_process_group()
    return StoppedEarly.exit_code if outcome.stopped else 0


def _open_data(job: TrainJob, context: RunContext) -> Pack:
    """The pack that the supervisor prepared; prepared here if this process was started without one."""
    from serai.data.pack import open_pack
    from serai.data.prepare import Prepared, prepare

    handed = context.run_dir / "prepared.json"
    if handed.is_file():
        return open_pack(Prepared.load(handed).manifest)
    cache = context.run_dir.parent.parent / "cache"
    prepared = prepare(job.data, cache=cache, seed=job.train.seed)
    return open_pack(prepared.manifest)


def _checkpointer(job: TrainJob, context: RunContext) -> CheckpointerLike:
    import serai

    config = job.checkpoint
    checkpointer: CheckpointerLike = serai.Checkpointer(
        context.checkpoints,
        local=config.local,
        memory=config.memory,
        keep=serai.Keep(last=config.keep_last, every=config.keep_every),
        on_error=config.on_error,
    )
    return checkpointer


def explain(error: BaseException) -> tuple[BaseException, str]:
    """The error to show, and its cause class (the supervisor decides by it what to do next)."""
    import torch

    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        shown = TrainingError(
            f"out of memory: {text.splitlines()[0] if text else type(error).__name__}",
            code="S603",
            where=f"rank {os.environ.get('RANK', '0')}",
            expected="a micro batch whose activations fit beside weights, gradients and optimizer state",
            next_step="lower `train.micro_batch` and raise `train.grad_accumulation` by the same factor",
        )
        return shown, "out_of_memory"
    if isinstance(error, StorageFull) or (isinstance(error, OSError) and error.errno in (28, 122)):
        return error, "disk_full"
    if isinstance(error, TrainingError) and error.code in ("S601", "S602"):
        return error, "not_a_number"
    if _lost_a_peer(error):
        shown = TrainingError(
            f"the processes lost one another: {text.splitlines()[0] if text else type(error).__name__}",
            code="S605",
            where=f"rank {os.environ.get('RANK', '0')}",
            expected="every process to take part in every collective",
            next_step="look at the logs of the other ranks: one of them failed first",
        )
        return shown, "collective"
    if isinstance(error, SpecError):
        return error, "spec_error"
    if isinstance(error, SeraiError) and not isinstance(error, TrainingError):
        return error, "checkpoint"
    return error, "user_error"


def _lost_a_peer(error: BaseException) -> bool:
    """Whether a communication error is at the bottom of it."""
    from torch.distributed import DistError

    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, DistError) or any(words in text for words in _LOST_PEER):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Timed out waiting",
    "Broken pipe",
)


if __name__ == "__main__":
    sys.exit(main())
