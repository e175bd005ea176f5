"""AdamW with decay where it belongs, and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from serai.train.config import TrainConfig

__all__ = ["WarmupCosine", "build_optimizer"]


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all parameters; matrices and embeddings decay, norms and biases do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        fused=True,
    )


class WarmupCosine:
    """Linear warm-up to the peak, then half a cosine down to ``floor`` times the peak at the last step.

    The rate of step ``k`` (counted from 0) depends on ``k`` alone; the state is that one integer.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, peak: float, warmup: int, steps: int, floor: float
    ) -> None:
        self._optimizer = optimizer
        self._peak = peak
        self._warmup = warmup
        self._steps = steps
        self._floor = floor
        self._step = 0
        self._apply()

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        if step < self._warmup:
            return self._peak * (step + 1) / self._warmup
        span = max(self._steps - 1 - self._warmup, 1)
        progress = min((step - self._warmup) / span, 1.0)
        return self._peak * (self._floor + (1 - self._floor) * 0.5 * (1 + math.cos(math.pi * progress)))

    def step(self) -> None:
        """Set the rate of the next step."""
        self._step += 1
        self._apply()

    @property
    def current(self) -> float:
        """Rate of the step that comes next."""
        return self.rate(self._step)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = int(state["step"])
        self._apply()

    def _apply(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.current
