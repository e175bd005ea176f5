"""Whether two checkpoints hold the same bits under the same names. The only part of this room that needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["differences", "same_state"]

_GENERATORS = {"python", "numpy", "torch"}


def same_state(first: Path, second: Path) -> bool | None:
    """Compare the newest checkpoints of two roots; ``None`` when one of them has none."""
    from serai.checkpoint.catalog import generations
    from serai.checkpoint.reader import load

    if not generations(first) or not generations(second):
        return None
    return not differences(load(first), load(second))


def differences(left: Any, right: Any, name: str = "") -> list[str]:
    """Dotted names of what differs between two states, in type, shape, or any bit.

    Python's and numpy's generators are left out: when nobody seeds them they differ between any two runs, and
    when they are used the difference shows in losses and weights. torch's counts.
    """
    import numpy as np
    import torch

    if isinstance(left, dict) and isinstance(right, dict):
        names = list(dict.fromkeys([*left, *right]))
        if left.keys() >= _GENERATORS:
            names = [key for key in names if key not in ("python", "numpy")]
        absent = object()
        return [
            found
            for key in names
            for found in differences(
                left.get(key, absent), right.get(key, absent), f"{name}.{key}".lstrip(".")
            )
        ]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return [
            found for index, (one, other) in pairs for found in differences(one, other, f"{name}.{index}")
        ]
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape
        same = same and torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    elif isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        same = left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    elif isinstance(left, float) and isinstance(right, float):
        same = left.hex() == right.hex()
    else:
        same = type(left) is type(right) and left == right
    return [] if same else [name]
