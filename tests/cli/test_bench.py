"""``serai bench``: a small run has every figure; wrong words are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def serai(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "serai", *arguments], cwd=cwd, capture_output=True, text=True, timeout=240
    )


def test_a_small_run_measures_every_peer_that_is_here(tmp_path: Path) -> None:
    out = tmp_path / "results"
    found = serai(
        "bench", "checkpoint", "--size", "8MiB", "--rounds", "1", "--json", "--out", str(out), cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    report: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    rows = {row["name"]: row for row in report["rows"]}
    for name in ("serai", "torch.save", "DCP save", "DCP async_save (thread)", "DCP async_save (process)"):
        row = rows[name]
        assert row["note"] == "", row
        assert 0 < row["blocked"] <= row["durable"]
        assert row["restore"] > 0
    assert report["bytes"] == 8 << 20
    assert report["warm_copy"] > 0
    assert report["restore_memory"] > 0
    table = (out / "checkpoint.md").read_text()
    assert "| serai |" in table
    assert (out / "checkpoint.svg").read_text().startswith("<svg")
    assert not list(tmp_path.glob("bench-*"))


@pytest.mark.parametrize("arguments", [("soup",), ("checkpoint", "--size", "3 parsecs")])
def test_wrong_words_are_told(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    found = serai("bench", *arguments, "--json", cwd=tmp_path)
    assert found.returncode == 2
    assert json.loads(found.stdout)["error"]["code"] == "S156"
