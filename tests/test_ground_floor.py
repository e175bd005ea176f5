"""The ground floor: units, events, run context, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serai.context import RunContext, current_run
from serai.errors import CheckpointCorrupt, Problem, SpecError
from serai.events import EventWriter, follow_events, read_events
from serai.units import format_bandwidth, format_bytes, format_duration, parse_bytes


def test_units_print_as_documented() -> None:
    assert format_bytes(3 << 30) == "3.00 GiB"
    assert format_bytes(999) == "999 B"
    assert format_bandwidth(2.5e9) == "2.50 GB/s"
    assert [format_duration(s) for s in (0.0042, 12.34, 75, 7384)] == ["4.2 ms", "12.3 s", "1:15", "2:03:04"]
    assert parse_bytes("4 GiB") == 4 << 30
    assert parse_bytes("500MB") == 500_000_000
    with pytest.raises(ValueError, match="no size"):
        parse_bytes("4 parsecs")


def test_a_torn_event_is_skipped_and_repaired(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    with EventWriter(path, rank=0) as events:
        events.write("step", step=1)
    with path.open("ab") as stream:
        stream.write(b'{"kind": "step", "st')
    assert [e["step"] for e in read_events(path, kind="step")] == [1]
    with EventWriter(path, rank=0) as events:
        events.write("step", step=2)
    assert [e["step"] for e in read_events(path)] == [1, 2]
    *_, (last, offset) = follow_events(path)
    assert last["rank"] == 0
    assert offset == path.stat().st_size


def test_run_context_travels_through_the_environment(tmp_path: Path) -> None:
    context = RunContext(run_dir=tmp_path, attempt=3, checkpoints="s3://bucket/run")
    assert current_run(context.environment()) == context
    assert current_run({}) is None


def test_errors_say_where_expected_and_next() -> None:
    error = CheckpointCorrupt("bytes differ", where="a.safetensors@4096", next_step="serai ckpt verify")
    assert str(error).splitlines()[0] == "[S402] bytes differ"
    assert json.loads(json.dumps(error.to_json()))["error"]["next"] == "serai ckpt verify"
    spec = SpecError("1 problem", problems=[Problem("S102", "unknown key", "job.yaml", 7, 3, key="train.x")])
    assert spec.exit_code == 2
    assert spec.problems[0].where == "job.yaml:7:3 (train.x)"
