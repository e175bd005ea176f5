"""serai: train PyTorch models that run for days.

``import serai`` is light: the public names below are imported on first use, so that ``serai --help``
and shell completion never load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serai.checkpoint.catalog import verify as verify
    from serai.checkpoint.checkpointer import Checkpointer as Checkpointer
    from serai.checkpoint.checkpointer import Restored as Restored
    from serai.checkpoint.checkpointer import SaveHandle as SaveHandle
    from serai.checkpoint.policy import Keep as Keep
    from serai.checkpoint.reader import load as load
    from serai.checkpoint.state import RNG as RNG

__version__ = "0.1.0"

_PUBLIC = {
    "RNG": "serai.checkpoint.state",
    "Checkpointer": "serai.checkpoint.checkpointer",
    "Keep": "serai.checkpoint.policy",
    "Restored": "serai.checkpoint.checkpointer",
    "SaveHandle": "serai.checkpoint.checkpointer",
    "load": "serai.checkpoint.reader",
    "verify": "serai.checkpoint.catalog",
}

__all__ = ["RNG", "Checkpointer", "Keep", "Restored", "SaveHandle", "__version__", "load", "verify"]


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'serai' has no attribute {name!r}") from None
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return __all__
