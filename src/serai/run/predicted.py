"""Predicted against measured, for the report: what the planner says of the job that ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

__all__ = ["predicted"]


def predicted(
    resolved: Mapping[str, Any],
    start: Mapping[str, Any],
    events: Iterable[Mapping[str, Any]],
    workspace: Path,
) -> dict[str, Any] | None:
    """The planner's row, or ``None`` for a script, a GPU it cannot name, or a run with too few steps.

    The workspace's ``profile.toml`` (written by ``serai plan --calibrate``) is used where there is one.
    """
    if (
        resolved.get("script")
        or not resolved.get("model")
        or not str(start.get("device", "")).startswith("cpu")
    ):
        return None
    from pydantic import ValidationError

    from serai.errors import SeraiError
    from serai.plan.feedback import predicted_against_measured
    from serai.plan.profiles import read_profile
    from serai.train.config import ModelConfig

    profile = workspace / "profile.toml"
    try:
        shape = asdict(ModelConfig.model_validate(resolved["model"]).shape())
        vocabulary = int(((resolved.get("data") or {}).get("tokenizer") or {}).get("vocab_size", 4096))
        return predicted_against_measured(
            resolved, shape, vocabulary, events, profile=read_profile(profile) if profile.is_file() else None
        )
    except (SeraiError, ValidationError, KeyError, TypeError, ValueError):
        return None  # a report is never lost to a forecast
