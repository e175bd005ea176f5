"""``serai ckpt``: every verb, as text and as JSON, on checkpoints made without a training loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import serai
from serai.checkpoint.importing import import_checkpoint
from serai.cli.main import main


@dataclass
class Done:
    """What one command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.err == ""
        (line,) = self.out.splitlines()
        document: dict[str, Any] = json.loads(line)
        assert document["schema_version"] == 1
        return document

    @property
    def lines(self) -> list[dict[str, Any]]:
        assert self.err == ""
        return [json.loads(line) for line in self.out.splitlines()]


Ckpt = Callable[..., Done]


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ckpt:
    """Runs ``serai ckpt …`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["ckpt", *arguments])
        code = end.value.code
        assert code is None or isinstance(code, int)
        return Done(code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 10, 20 and 30, one attempt each."""
    for step in (10, 20, 30):
        weights = {"w": torch.arange(4.0) + step, "b": torch.ones(2)}
        save_file(weights, tmp_path / "x.safetensors")
        import_checkpoint(tmp_path / "x.safetensors", tmp_path / "root", step=step)
    return tmp_path / "root"


def harm(root: Path, step: int) -> None:
    (shard,) = root.glob(f"step-{step:08d}-*/shard-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_diff(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    found = ckpt("diff", "./root")
    assert (found.code, found.err) == (1, "")
    words = " ".join(found.out.split())
    assert words.startswith(
        "step 20 (step-00000020-0002-000000) and step 30 (step-00000030-0003-000000): 1 tensors"
    )
    assert "model.w 4 of 4 10 0.333" in words
    document = ckpt("diff", "./root", "--step", "10", "--step", "30", "--json").json
    assert (document["same"], document["exit_code"], document["equal_tensors"]) == (False, 1, 1)
    assert document["tensors"][0]["max_abs"] == 20.0
    same = ckpt("diff", "./root", "./root", "--step", "10")
    assert same.code == 0
    assert "all 2 tensors and every value are equal, bit for bit" in same.out
    only = ckpt("diff", "./root", "--keys", "model.b", "--json").json
    assert only["same"]
    for arguments in (("--step", "10"), ("--step", "10", "--step", "10", "--step", "10")):
        assert ckpt("diff", "./root", *arguments, "--json").json["error"]["code"] == "S150"
    assert ckpt("diff", "./root", "--step", "10", "--step", "99", "--json").json["error"]["code"] == "S401"


def test_copy(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    found = ckpt("copy", "./root", "other", "--step", "10")
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("step 10  copied ")
    document = ckpt("copy", "./root", str(tmp_path / "other"), "--all", "--json").json
    assert [g["step"] for g in document["generations"]] == [10, 20, 30]
    assert document["generations"][0]["bytes"] == 0
    assert document["newest"] == 30
    assert "there already, verified" in ckpt("copy", "./root", "other").out
    assert ckpt("verify", "other").code == 0
    late = ckpt("copy", "./root", "other", "--step", "10")
    assert "a restore from other takes step 30, which is newer there" in late.out
    assert ckpt("copy", "./root", "other", "--step", "10", "--all", "--json").json["error"]["code"] == "S150"


def test_export_and_import(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    found = ckpt("export", "./root", "hf", "--keys", "model", "--max-shard-size", "16B")
    assert (found.code, found.err) == (0, "")
    assert "step 30: 2 tensors, 24 B, as safetensors in" in found.out
    assert found.out.count("model-0000") == 2
    document = ckpt("export", "./root", "m.safetensors", "--keys", "model", "--step", "10", "--json").json
    assert document["files"] == [str(tmp_path / "m.safetensors")]
    assert load_file("m.safetensors")["w"].tolist() == [10.0, 11.0, 12.0, 13.0]
    again = ckpt("export", "./root", "m.safetensors", "--json")
    assert (again.code, again.json["error"]["code"]) == (1, "S433")
    assert ckpt("export", "./root", "x", "--max-shard-size", "lots", "--json").code == 2

    made = ckpt("import", "hf", "./new", "--step", "7", "--as", "net", "--json").json
    assert (made["format"], made["step"], made["names"]) == ("safetensors", 7, ["net"])
    assert serai.load(tmp_path / "new")["net"]["w"][0].item() == 30.0
    missing = ckpt("import", "nowhere", "./new", "--json")
    assert (missing.code, missing.json["error"]["code"]) == (1, "S436")
    assert ckpt("import", "hf", "./new", "--rename", "x", "--json").code == 2
    torch.save({"state_dict": {"w": torch.ones(1)}}, "x.pt")
    assert ckpt("import", "x.pt", "./new", "--rename", "state_dict=model", "--json").json["names"] == [
        "model"
    ]


def test_prune_and_pins(ckpt: Ckpt, root: Path) -> None:
    assert ckpt("pin", "./root", "--step", "10").out == "step-00000010-0001-000000 is pinned\n"
    assert ckpt("pin", "./root", "--step", "10", "--json").json["changed"] is False
    assert [line["pinned"] for line in ckpt("ls", "./root", "--json").lines] == [False, False, True]
    assert "(pinned)" in ckpt("ls", "./root").out
    dry = ckpt("prune", "./root", "--keep-last", "1")
    assert dry.out.startswith("would remove step-00000020-0002-000000")
    assert dry.out.endswith("nothing was removed: add --yes\n")
    document = ckpt("prune", "./root", "--keep-last", "1", "--json").json
    assert document["dry_run"] is True
    assert len(ckpt("ls", "./root", "--json").lines) == 3
    done = ckpt("prune", "./root", "--keep-last", "1", "--yes", "--json").json
    assert [g["step"] for g in done["removed"]] == [20]
    assert [g["step"] for g in done["kept"]] == [30, 10]
    assert ckpt("unpin", "./root", "--step", "10").out == "step-00000010-0001-000000 is no longer pinned\n"
    assert ckpt("prune", "./root", "--keep-last", "0", "--json").code == 2
    assert ckpt("prune", "./root", "--keep-every", "10", "--yes", "--json").json["removed"] == []


def test_head(ckpt: Ckpt, root: Path, tmp_path: Path) -> None:
    found = ckpt("head", "./root")
    assert (found.code, found.out, found.err) == (0, f"{root}/step-00000030-0003-000000\n", "")
    harm(root, 30)
    found = ckpt("head", "./root", "--print", "step")
    assert (found.code, found.out) == (0, "20\n")
    assert found.err.startswith("passed over: step-00000030")
    document = ckpt("head", "./root", "--json").json
    assert document["path"] == f"{root}/step-00000020-0002-000000"
    assert len(document["passed_over"]) == 1
    assert ckpt("head", "./root", "--print", "name", "-q").out == "step-00000020-0002-000000\n"
    broken = ckpt("head", "./root", "--step", "30", "--json")
    assert (broken.code, broken.json["error"]["code"]) == (1, "S402")
    (tmp_path / "empty").mkdir()
    assert ckpt("head", "./empty", "--json").json["error"]["code"] == "S401"


def test_the_history(ckpt: Ckpt, root: Path) -> None:
    ckpt("prune", "./root", "--keep-last", "1", "--yes")
    lines = ckpt("ls", "./root", "--history", "--json").lines
    assert [(line["event"], line["step"]) for line in lines] == [
        ("removed", 10),
        ("removed", 20),
        ("committed", 30),
        ("committed", 20),
        ("committed", 10),
    ]
    text = ckpt("ls", "./root", "--history").out.splitlines()
    assert text[0].split() == ["STEP", "WHEN", "EVENT", "SIZE", "TOOK", "GENERATION"]
    assert len(text) == 6
    assert ckpt("ls", "s3://bucket/x", "--history").code == 0
