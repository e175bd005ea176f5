"""``serai --help`` and completion are quick and never import torch."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "transformers", "yaml", "rich", "obstore", "psutil", "jinja2")


def loaded_by(code: str, **variables: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code + "\nimport sys; print('\\n'.join(sys.modules), file=sys.stderr)"],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=60,
        check=True,
    )
    return {name.split(".")[0] for name in done.stderr.splitlines()}


def run_in_process(*arguments: str) -> str:
    return f"""
import sys
sys.argv = ["serai", *{list(arguments)!r}]
from serai.cli.main import main
try:
    main()
except SystemExit as end:
    assert end.code in (0, None), end.code
"""


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--help",),
        ("run", "--help"),
        ("ckpt", "ls", "--help"),
        ("--version",),
        ("explain", "S101"),
        ("ps",),
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = loaded_by(run_in_process(*arguments))
    assert "serai" in found
    assert not found & {"torch", "numpy", "transformers"}
    if arguments != ("ps",):
        assert not found & set(HEAVY)


def test_checking_a_job_imports_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(
        "serai: 1\nname: x\nmodel: {preset: tiny}\ndata: {corpus: shakespeare}\ntrain: {steps: 1}\n"
    )
    for arguments in (("run", "--dry-run"), ("run", "--show-config"), ("explain", "train"), ("init", "demo")):
        assert "torch" not in loaded_by(run_in_process(*arguments))


def test_completion_imports_no_torch_and_knows_the_commands(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "serai"],
        env={**os.environ, "_SERAI_COMPLETE": "complete_bash", "COMP_WORDS": "serai ck", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["ckpt"]
    code = "import serai.cli.main"
    assert not loaded_by(code) & set(HEAVY)


def test_help_is_within_200_ms_of_a_bare_interpreter() -> None:
    """Processor time, which is the wall time of a machine with nothing else to do; the best of several runs."""

    def seconds(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    bare = min(seconds("-c", "pass") for _ in range(5))
    best = min(seconds("-m", "serai", "--help") for _ in range(5))
    assert best - bare < 0.2
