"""A loud warning, once, when the step advances and nothing that is trained changes."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.samples import step, trained

import serai


def save(checkpointer: serai.Checkpointer, number: int, state: dict[str, Any]) -> None:
    checkpointer.save(number, state).wait("durable", 60)


def test_a_copy_that_is_saved_instead_of_the_model(tmp_path: Path) -> None:
    state = trained()
    wrong = {"model": copy.deepcopy(state["model"]), "progress": {"seen": 0}, "rng": serai.RNG()}
    with serai.Checkpointer(tmp_path) as checkpointer:
        for number in range(1, 3):
            wrong["progress"] = {"seen": number}  # values and generators change; they are no parameters
            step(state["model"], state["optimizer"])
            save(checkpointer, number, wrong)
        with pytest.warns(UserWarning, match="NOTHING CHANGED from step 1 to step 2") as caught:
            save(checkpointer, 3, wrong)
        assert caught[0].filename == __file__
        save(checkpointer, 4, wrong)  # once is enough


def test_what_trains_or_is_no_model_is_silent(tmp_path: Path) -> None:
    state = trained()
    frozen = torch.nn.Linear(600, 600).requires_grad_(False)  # in a file of its own, which never changes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with serai.Checkpointer(tmp_path / "trains") as checkpointer:
            for number in range(1, 5):
                save(checkpointer, number, {**state, "frozen": frozen})
                step(state["model"], state["optimizer"])
        with serai.Checkpointer(tmp_path / "frozen") as checkpointer:
            for number in range(1, 5):
                save(checkpointer, number, {"frozen": frozen})
        with serai.Checkpointer(tmp_path / "plain") as checkpointer:
            for number in range(1, 5):
                save(checkpointer, number, {"x": torch.ones(3), "n": number})


def test_saving_one_step_again_is_silent(tmp_path: Path) -> None:
    state = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with serai.Checkpointer(tmp_path) as checkpointer:
            for _ in range(4):
                save(checkpointer, 7, state)


def test_only_the_optimizer_moves(tmp_path: Path) -> None:
    """A warm-up from a learning rate of zero changes moments only: that is training."""
    state = trained()
    state["optimizer"].param_groups[0].update(lr=0.0, weight_decay=0.0)
    state["model"].eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with serai.Checkpointer(tmp_path) as checkpointer:
            for number in range(1, 5):
                save(checkpointer, number, state)
                step(state["model"], state["optimizer"])
