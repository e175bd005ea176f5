"""The trainer: set-up in named steps, and a training loop that reads like prose."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from serai.data.loader import Loader, StepBatch, validation_batches
from serai.data.pack import Pack
from serai.errors import TrainingError
from serai.train.job import TrainJob
from serai.train.launched import Launched
from serai.train.model import build_model, count_parameters, llama_config, materialise, sum_of_losses
from serai.train.optimizer import WarmupCosine, build_optimizer
from serai.train.parallel import strategy
from serai.train.processes import sum_over_ranks, values_of_ranks
from serai.train.reporting import Reporter, StepFigures
from serai.train.saving import CheckpointerLike, Checkpoints
from serai.train.signals import StopFlag

__all__ = ["Outcome", "Trainer"]


@dataclass(frozen=True)
class Outcome:
    """How training ended: ``stopped`` on request, or done."""

    step: int
    stopped: bool


@dataclass(frozen=True)
class _Agreed:
    """What all ranks know of a step after the one all-reduce: its exact mean loss, and whether to stop."""

    loss: float
    stop: bool


class Trainer:
    """Trains one job on one rank; all ranks run the same code and agree once a step.

    Args:
        pack: the opened data.
        checkpointer: makes the engine's checkpointer, after the process group exists.
        stop: set from outside to stop at the next step boundary.
        grace_s: seconds that the last save may take to become durable.
    """

    def __init__(
        self,
        job: TrainJob,
        *,
        pack: Pack,
        launched: Launched,
        device: torch.device,
        reporter: Reporter,
        checkpointer: Callable[[], CheckpointerLike],
        stop: StopFlag,
        grace_s: float,
    ) -> None:
        self.config = job.train
        self.pack = pack
        self.rank, self.world = launched.rank, launched.world
        self.device = device
        self.reporter = reporter
        self.stop = stop
        self.grace_s = grace_s
        self.progress: dict[str, Any] = {"step": 0}
        self._build_data(job)
        self._build_model(job)
        self._build_optimizer()
        self._build_checkpoints(job, checkpointer)
        reporter.start(
            world=self.world,
            device=device,
            parameters=count_parameters(self.model),
            strategy=job.parallel.strategy,
            batch=job.global_batch,
        )

    def _build_data(self, job: TrainJob) -> None:
        self.loader = Loader(
            self.pack.train,
            fingerprint=self.pack.fingerprint,
            global_batch=job.global_batch,
            micro_batch=job.train.micro_batch,
            seed=job.train.seed,
            rank=self.rank,
            world=self.world,
        )

    def _build_model(self, job: TrainJob) -> None:
        self.parallel = strategy(job.parallel.strategy)(
            device=self.device, world=self.world, precision=job.train.precision
        )
        config = llama_config(
            job.model,
            vocab_size=self.pack.vocab_size,
            seq_len=self.pack.seq_len,
            end_of_text=int(self.pack.manifest["end_of_text"]),
        )
        torch.manual_seed(job.train.seed + self.rank)
        self.model: nn.Module = build_model(config)
        self.parallel.shard(self.model)
        materialise(self.model, device=self.device, seed=job.train.seed)
        self.wrapped = self.parallel.wrap(self.model)

    def _build_optimizer(self) -> None:
        self.optimizer = build_optimizer(self.model, self.config)
        self.scheduler = WarmupCosine(
            self.optimizer,
            peak=self.config.learning_rate,
            warmup=self.config.warmup_steps,
            steps=self.config.steps,
            floor=self.config.min_learning_rate_ratio,
        )

    def _build_checkpoints(self, job: TrainJob, checkpointer: Callable[[], CheckpointerLike]) -> None:
        import serai

        state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "rng": serai.RNG(),
            "progress": self.progress,
        }
        every = job.checkpoint.every if isinstance(job.checkpoint.every, int) else 100
        self.checkpoints = Checkpoints(checkpointer(), state, self.reporter, every=every)

    @property
    def step(self) -> int:
        """Updates made so far, by this process and those before it."""
        return int(self.progress["step"])

    def train(self) -> Outcome:
        """Train from the newest checkpoint to the last step, or until a stop is requested."""
        self.checkpoints.restore()
        stopping = self.anyone_wants_to_stop()
        loss = math.nan
        while self.step < self.config.steps and not stopping:
            started = time.perf_counter()
            batch = self.loader.next()
            agreed = self.agree(batch, self.forward_and_backward(batch))
            loss, stopping = agreed.loss, agreed.stop
            rate, norm = self.scheduler.current, self.update()
            self.report(batch, loss, rate, norm, seconds=time.perf_counter() - started)
            if self.evaluation_due():
                self.evaluate()
            if self.checkpoints.due(self.step):
                self.checkpoints.save(self.step, loss=loss)
            self.checkpoints.notice()
        return self.stopped(loss) if stopping and self.step < self.config.steps else self.finished(loss)

    def forward_and_backward(self, batch: StepBatch) -> float:
        """Gradients of the global batch's mean loss; returns this rank's sum of losses.

        Every token weighs the same wherever it lies: each rank's sum is divided by the tokens of the
        *global* batch, and multiplied by the number of ranks because gradients are averaged over them.
        """
        scale = self.world / batch.tokens
        total = 0.0
        for number, (inputs, labels) in enumerate(batch.micro_batches, start=1):
            last = number == len(batch.micro_batches)
            with self.parallel.accumulate(self.wrapped, last=last):
                loss = self.loss(self.wrapped, inputs, labels)
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    def loss(self, module: nn.Module, inputs: Any, labels: Any) -> torch.Tensor:
        """Sum of losses of one micro batch of numpy arrays."""
        with self.parallel.compute():
            return sum_of_losses(
                module, torch.from_numpy(inputs).to(self.device), torch.from_numpy(labels).to(self.device)
            )

    def agree(self, batch: StepBatch, local_loss: float) -> _Agreed:
        """The one all-reduce of a step, before anything is updated.

        Raises:
            TrainingError: the loss is not finite (S601), or the ranks read different batches (S604).
        """
        read = sum(int((labels >= 0).sum()) for _, labels in batch.micro_batches)
        loss, tokens, stops = sum_over_ranks(
            [local_loss, float(read), float(self.stop.reason is not None)], self.device
        )
        step = batch.step + 1
        if int(tokens) != batch.tokens:
            raise TrainingError(
                f"the ranks read {int(tokens)} tokens in step {step}, the plan says {batch.tokens}",
                code="S604",
                expected="the same prepared data and the same job on every rank",
                next_step="look at the `start` events of all ranks in the run's events folder",
            )
        if not math.isfinite(loss):
            ranks = [
                r
                for r, value in enumerate(values_of_ranks(local_loss, self.device))
                if not math.isfinite(value)
            ]
            raise TrainingError(
                f"the loss of step {step} is not a number (on rank {', '.join(map(str, ranks))})",
                code="S601",
                where=f"step {step}, learning rate {self.scheduler.current:g}",
                expected="a finite loss; nothing was updated or saved after it",
                next_step="lower `train.learning_rate` or raise `train.warmup_steps`, then run again",
            )
        return _Agreed(loss=loss / tokens, stop=stops > 0)

    def update(self) -> float:
        """Clip, step the optimizer and the schedule; returns the gradient norm before clipping.

        Raises:
            TrainingError: the norm is not finite (S602); nothing has been updated then.
        """
        norm = self.parallel.clip(self.model, self.config.clip_norm)
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradient of step {self.step + 1} is not a number",
                code="S602",
                where=f"step {self.step + 1}, learning rate {self.scheduler.current:g}",
                expected="a finite gradient norm; nothing was updated or saved after it",
                next_step="lower `train.learning_rate` or raise `train.warmup_steps`, then run again",
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        self.progress["step"] += 1
        return norm

    def report(self, batch: StepBatch, loss: float, rate: float, norm: float, *, seconds: float) -> None:
        self.checkpoints.observe(seconds)
        if self.step % self.config.log_every == 0 or self.step == self.config.steps:
            self.reporter.step(StepFigures(self.step, loss, batch.tokens, seconds, rate, norm, batch.wait_s))

    def evaluation_due(self) -> bool:
        """At every so many steps, and at the last one, before its save."""
        every = self.config.evaluate_every
        return self.step == self.config.steps or (every is not None and self.step % every == 0)

    def evaluate(self) -> float:
        """Mean loss over validation rows: summed over all ranks, then divided, each row counted once."""
        started = time.perf_counter()
        rows = min(self.config.evaluate_rows, len(self.pack.validation))
        batches = validation_batches(
            self.pack.validation,
            micro_batch=self.config.micro_batch,
            rank=self.rank,
            world=self.world,
            limit=rows,
        )
        total, tokens = 0.0, 0
        with self.parallel.evaluating(self.model):
            for inputs, labels in batches:
                total += float(self.loss(self.model, inputs, labels))
                tokens += int((labels >= 0).sum())
                self.reporter.beat(step=self.step, evaluating=True)
        total, predicted = sum_over_ranks([total, float(tokens)], self.device)
        loss = total / predicted
        self.reporter.evaluation(
            step=self.step,
            loss=loss,
            tokens=int(predicted),
            seconds=time.perf_counter() - started,
            rows=rows,
        )
        return loss

    def anyone_wants_to_stop(self) -> bool:
        return sum_over_ranks([float(self.stop.reason is not None)], self.device)[0] > 0

    def stopped(self, loss: float) -> Outcome:
        """Save where we are, wait until that is durable, and say so."""
        if self.step > 0:
            self.checkpoints.save(self.step, loss=loss)
            self.checkpoints.wait(timeout=self.grace_s)
        self.close()
        self.reporter.write("stopped", step=self.step, reason=self.stop.reason or "another rank")
        return Outcome(self.step, stopped=True)

    def finished(self, loss: float) -> Outcome:
        """Make the last step durable, and say so."""
        self.checkpoints.save(self.step, loss=loss)
        self.checkpoints.wait(timeout=max(self.grace_s, 600.0))
        self.close()
        self.reporter.write("done", step=self.step)
        return Outcome(self.step, stopped=False)

    def close(self) -> None:
        self.loader.close()
        self.checkpoints.close(timeout=self.grace_s)
