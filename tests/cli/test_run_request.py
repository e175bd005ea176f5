"""``serai run --dry-run --show-request`` prints what would be started, and starts nothing."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.serai_program import serai


def test_the_request_is_printed_and_nothing_is_made(tmp_path: Path) -> None:
    assert serai("init", "demo", cwd=tmp_path).code == 0
    found = serai("run", "script.yaml", "--dry-run", "--show-request", "--json", cwd=tmp_path / "demo")
    _, command, _, document = found.json["dry_run"]["request"].split("\n", 3)
    assert " -m serai.run " in command
    request = json.loads(document)
    assert request["processes"] == 2
    assert request["command"][2:] == [
        str(tmp_path / "demo" / "train.py"),
        "--steps",
        "200",
        "--save-every",
        "20",
    ]
    assert not (tmp_path / "demo" / ".serai").exists()


def test_it_only_goes_with_a_dry_run(tmp_path: Path) -> None:
    assert serai("init", "demo", cwd=tmp_path).code == 0
    found = serai("run", "script.yaml", "--show-request", cwd=tmp_path / "demo")
    assert found.code == 2
    assert "only goes with --dry-run" in found.err
