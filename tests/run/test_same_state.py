"""Two states are the same only bit by bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from serai.run.same_state import differences


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros((), dtype=torch.bfloat16)},
        "optimizer": {"groups": [{"lr": 0.1, "betas": (0.9, 0.95)}], "nan": float("nan")},
        "rng": {"python": [3, np.arange(4), None], "numpy": ["MT", np.arange(4)], "torch": b"123"},
        "step": 7,
    }


def changed(*path: Any, value: Any) -> list[str]:
    other = state()
    place: Any = other
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return differences(state(), other)


def test_equal_states_have_no_differences() -> None:
    assert differences(state(), state()) == []


def test_what_differs_is_named() -> None:
    weights = torch.arange(6.0).reshape(2, 3)
    weights[1, 2] = math.nextafter(5.0, 9.0)
    assert changed("model", "w", value=weights) == []  # float32 has no such neighbour: it rounds back to 5
    weights[1, 2] = float(np.nextafter(np.float32(5.0), np.float32(9.0)))
    assert changed("model", "w", value=weights) == ["model.w"]
    assert changed("model", "w", value=torch.arange(6.0)) == ["model.w"]
    assert changed("model", "b", value=torch.tensor(-0.0, dtype=torch.bfloat16)) == ["model.b"]
    assert changed("optimizer", "groups", 0, "lr", value=math.nextafter(0.1, 1.0)) == [
        "optimizer.groups.0.lr"
    ]
    assert changed("step", value=7.0) == ["step"]
    assert changed("extra", value=1) == ["extra"]


def test_only_torchs_generator_counts() -> None:
    assert changed("rng", "torch", value=b"124") == ["rng.torch"]
    assert changed("rng", "python", value=[3, np.arange(5), None]) == []
