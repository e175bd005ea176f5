"""Ways to spread a model over processes: one class a strategy, one file each, looked up by name."""

from __future__ import annotations

from importlib import import_module

from serai.train.parallel.base import Parallel

__all__ = ["STRATEGIES", "Parallel", "strategy"]

STRATEGIES = {
    "ddp": ("serai.train.parallel.ddp", "DDP"),
    "fsdp2": ("serai.train.parallel.fsdp2", "FSDP2"),
}
"""Name in the job file → module and class, imported when it is used."""


def strategy(name: str) -> type[Parallel]:
    """The class of a strategy."""
    module, attribute = STRATEGIES[name]
    found: type[Parallel] = getattr(import_module(module), attribute)
    return found
