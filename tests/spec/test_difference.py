"""Which changes make another run, and which a run of the same name may take."""

from __future__ import annotations

from typing import Any

import pytest

from serai.spec import JobSpec, changed_spec_error, spec_difference

BASE: dict[str, Any] = {
    "serai": 1,
    "name": "x",
    "model": {"preset": "tiny"},
    "data": {"corpus": "shakespeare"},
    "train": {"steps": 100, "micro_batch": 4, "grad_accumulation": 2},
    "resources": {"processes": 2},
}


def job(**changes: Any) -> JobSpec:
    """The base with changes: ``train__seed=3``."""
    document = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    for path, value in changes.items():
        *sections, key = path.split("__")
        place = document
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return JobSpec.model_validate(document)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"checkpoint__every": 5, "checkpoint__keep_last": 9, "checkpoint__root": "s3://b/c"},
        {"retry__max": 0},
        {"parallel__strategy": "ddp"},
        {"resources__device": "cpu", "resources__threads": 3},
        {"train__evaluate_every": None, "train__evaluate_rows": 3, "train__log_every": 7},
        {"train__collective_timeout_s": 30.0},
        {"resources__processes": 4, "train__grad_accumulation": 1},
        {"resources__processes": 1, "train__micro_batch": 8},
        {"train__micro_batch": 2, "train__grad_accumulation": 4},
        {"model__layers": 4},
    ],
)
def test_the_same_run(changes: dict[str, Any]) -> None:
    assert spec_difference(job(), job(**changes)) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train__learning_rate": 1e-3}, [("train.learning_rate", 3e-4, 1e-3)]),
        ({"train__steps": 101}, [("train.steps", 100, 101)]),
        (
            {"train__seed": 2, "train__precision": "bf16"},
            [("train.seed", 1, 2), ("train.precision", "fp32", "bf16")],
        ),
        ({"data__seq_len": 128}, [("data.seq_len", 256, 128)]),
        ({"data__tokenizer": {"vocab_size": 512}}, [("data.tokenizer.vocab_size", 4096, 512)]),
        ({"model__layers": 5}, [("model.layers", 4, 5)]),
        ({"resources__processes": 3}, [("resources.processes", 2, 3)]),
        ({"train__micro_batch": 5}, [("train.micro_batch", 4, 5)]),
        (
            {"train__micro_batch": 8, "resources__processes": 4},
            [("train.micro_batch", 4, 8), ("resources.processes", 2, 4)],
        ),
        ({"name": "y"}, [("name", "x", "y")]),
    ],
)
def test_another_run(changes: dict[str, Any], expected: list[tuple[str, Any, Any]]) -> None:
    found = spec_difference(job(), job(**changes))
    assert [(entry.key, entry.old, entry.new) for entry in found] == expected


def test_a_script_decides_by_itself_what_its_processes_mean() -> None:
    def script(**fields: Any) -> JobSpec:
        return JobSpec.model_validate({"serai": 1, "name": "x", "script": "/a.py", **fields})

    assert spec_difference(script(), script(resources={"processes": 8})) == []
    (entry,) = spec_difference(script(args=["1"]), script(args=["2"]))
    assert (entry.key, entry.old, entry.new) == ("args", ["1"], ["2"])


def test_the_error_shows_every_difference() -> None:
    error = changed_spec_error(
        "x", spec_difference(job(), job(train__seed=2, train__betas=[0.8, 0.9])), where="job.yaml"
    )
    assert (error.code, error.exit_code, error.where) == ("S127", 2, "job.yaml")
    assert "train.seed: 1 → 2" in error.message
    assert [problem.next_step for problem in error.problems] == [
        "--set 'train.betas=[0.9, 0.95]'",
        "--set train.seed=1",
    ]
