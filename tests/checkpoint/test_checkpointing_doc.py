"""Every block of docs/checkpointing.md runs, or at least parses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from serai.checkpoint.format import DTYPES
from serai.checkpoint.values import encode
from serai.cli.main import main

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpointing.md"
TEXT = DOCUMENT.read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[str]:
    return [body for language, body in BLOCKS if language == kind]


def test_every_block_is_of_a_known_kind() -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "sh", "json", "text"}
    assert TEXT.count("```") == 2 * len(BLOCKS)


def test_the_python_and_the_commands_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for number, body in enumerate(blocks("python")):
        exec(compile(body, f"{DOCUMENT.name}, block {number}", "exec"), namespace)
    capsys.readouterr()
    lines = [line for body in blocks("sh") for line in body.splitlines()]
    assert len(lines) > 15
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "serai"
        with pytest.raises(SystemExit) as end:
            main(arguments)
        found = capsys.readouterr()
        assert end.value.code in (0, None), (line, found.out, found.err)
        assert found.out, line
    weights = torch.load("all.pt", weights_only=True)["model"]
    assert weights["weight"].shape == (4, 8)


def test_the_json_parses() -> None:
    found = [json.loads(body) for body in blocks("json")]
    assert found[0]["format"] == "serai-checkpoint"


def test_every_dtype_and_its_size_is_listed() -> None:
    paragraph = TEXT[TEXT.index("**dtypes**") :].split("\n\n")[0]
    assert dict(re.findall(r"`(\w+)` (\d+)", paragraph)) == {
        name: str(dtype.itemsize) for name, dtype in DTYPES.items()
    }


def test_every_tag_is_listed() -> None:
    source = (Path(__file__).parents[2] / "src/serai/checkpoint/values.py").read_text()
    tags = set(re.findall(r'"\$(\w+)"', source)) | {"bytes", "bytearray", "set", "frozenset"}
    assert set(re.findall(r'`\{"\$(\w+)"', TEXT)) | {"bytearray"} == tags | {"bytearray"}
    for value, tag in (
        (b"x", "$bytes"),
        ({1}, "$set"),
        ((1,), "$tuple"),
        ({1: 2}, "$dict"),
        (1j, "$complex"),
    ):
        assert list(encode(value, "x")) == [tag]
