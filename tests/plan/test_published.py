"""The shipped profiles against published measurements: the package's own table, and the large one where present."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from serai.errors import SpecError
from serai.plan import predict
from serai.plan.check import check, render
from serai.plan.profiles import load_profile, profile_names, read_profile, write_profile
from serai.plan.published import Row, own_table, read_folder, read_rows

ROWS = list(read_rows(own_table()))
FOLDER = Path(os.environ.get("SERAI_PUBLISHED", Path(__file__).parents[3] / "shared" / "published"))


def _errors(rows: list[Row]) -> np.ndarray:
    found = []
    for row in rows:
        assert row.step_time_s is not None
        p = predict(row.model, row.cluster, row.layout, profile=row.profile)
        found.append(p.step_time_s / row.step_time_s - 1)
    return np.abs(found)


@pytest.mark.parametrize(
    ("source", "most"),
    [("deepspeed_azure_2022", 0.05), ("mosaicml_llm_foundry", 0.06), ("nvidia_dgxc", 0.06), ("bloom_bigscience", 0.06), ("korthikanti_2022", 0.08), ("vtrain_single", 0.12), ("megatron_readme_h100", 0.12)],
)  # fmt: skip
def test_mean_step_time_error_by_source(source: str, most: float) -> None:
    rows = [row for row in ROWS if row.source == source and row.step_time_s and row.headline is None]
    assert len(rows) >= 2
    assert _errors(rows).mean() <= most


def test_the_four_headline_points() -> None:
    rows = [row for row in ROWS if row.headline is not None]
    assert sorted(row.headline or 0 for row in rows) == [157.0, 165.36, 170.42, 171.37]
    for row in rows:
        p = predict(row.model, row.cluster, row.layout)
        assert abs(p.tflops("hardware") / (row.headline or 1) - 1) <= 0.08, row.label


def test_measured_memory_and_out_of_memory() -> None:
    measured = [row for row in ROWS if row.memory_gb and not row.analytic_memory]
    assert len(measured) >= 6
    errors = [
        predict(r.model, r.cluster, r.layout, profile=r.profile).memory_gb / (r.memory_gb or 1) - 1
        for r in measured
    ]
    assert np.abs(errors).mean() <= 0.10
    died = [row for row in ROWS if row.out_of_memory]
    assert len(died) == 2
    assert not any(predict(r.model, r.cluster, r.layout, profile=r.profile).fits for r in died)


def test_intervals_hold_for_most_rows() -> None:
    rows = [row for row in ROWS if row.step_time_s]
    inside = 0
    for row in rows:
        low, high = predict(row.model, row.cluster, row.layout).step_time_interval_s
        inside += low <= (row.step_time_s or 0) <= high
    assert inside / len(rows) >= 0.75


def test_the_table_is_printed_and_read_back(tmp_path: Path) -> None:
    report = check()
    text = render(report)
    assert "left out" in text
    assert "NOT predicted" not in text
    assert {line.source for line in report.left_out} == {line.source for line in report.fitted}
    assert report.to_json()["schema_version"] == 1
    # leaving a source out can only lose what it taught
    total = sum(line.rows for line in report.fitted)
    fitted = sum(line.rows * line.mean for line in report.fitted) / total
    assert sum(line.rows * line.mean for line in report.left_out) / total > fitted
    with pytest.raises(SpecError) as caught:
        check(tmp_path)
    assert caught.value.code == "S135"


def test_profiles_survive_a_round_trip(tmp_path: Path) -> None:
    assert {"default", "ndm-a100-v4/deepspeed-2022", "h100/megatron-2025"} <= set(profile_names())
    for name in profile_names():
        profile = load_profile(name)
        write_profile(profile, tmp_path / "p.toml")
        assert read_profile(tmp_path / "p.toml") == profile
        assert read_profile(tmp_path / "p.toml").hull == profile.hull
        assert read_profile(tmp_path / "p.toml").points == profile.points
    with pytest.raises(SpecError) as caught:
        load_profile("h100/nothing")
    assert caught.value.code == "S136"
    (tmp_path / "broken.toml").write_text("name = ")
    with pytest.raises(SpecError):
        load_profile(str(tmp_path / "broken.toml"))


@pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the folder of published rows: set SERAI_PUBLISHED")
def test_the_large_tables() -> None:
    rows = [row for row in read_folder(FOLDER) if row.step_time_s and row.headline is None]
    by_source: dict[str, list[Row]] = {}
    for row in rows:
        by_source.setdefault(row.source, []).append(row)
    for source, members in by_source.items():
        assert _errors(members).mean() <= (0.05 if source == "deepspeed_azure_2022" else 0.12), source
