"""How a failure looks: caret, place, what to do next; one JSON object; no colour where none is wanted."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.serai_program import serai

from serai.cli.failures import render_error, render_problem
from serai.errors import Problem, SeraiError, SpecError

JOB = """\
serai: 1
name: demo
model: {preset: tinny}
data: {corpus: shakespeare, seq_len: 64}
train:
  steps: ten
"""


def test_two_problems_as_people_read_them(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    found = serai("run", "job.yaml", cwd=tmp_path)
    assert (found.code, found.out) == (2, "")
    assert (
        found.err
        == """\
error[S113]: `model.preset` is the text 'tinny'
  --> job.yaml:3:17
  |
3 | model: {preset: tinny}
  |                 ^^^^^
  = expected: tiny, small, 125m, 350m, 1b, 3b, 7b, 8b, 13b or 70b
  = next: perhaps you meant `preset: tiny`

error[S102]: `train.steps` is the text 'ten'
  --> job.yaml:6:10
  |
6 |   steps: ten
  |          ^^^
  = expected: an integer ≥ 1
  = next: serai explain train.steps

error: job.yaml has 2 problems
"""
    )


def test_the_same_as_one_json_object(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    for arguments in (
        ("--json", "run", "job.yaml"),
        ("run", "--json", "job.yaml"),
        ("run", "job.yaml", "--json"),
    ):
        found = serai(*arguments, cwd=tmp_path)
        assert found.code == found.json["exit_code"] == 2
        problems = found.json["error"]["problems"]
        assert [(p["code"], p["file"], p["line"], p["column"], p["key"]) for p in problems] == [
            ("S113", "job.yaml", 3, 17, "model.preset"),
            ("S102", "job.yaml", 6, 10, "train.steps"),
        ]


def test_verbose_adds_the_traceback_above_the_error(tmp_path: Path) -> None:
    found = serai("run", "absent.yaml", "-v", cwd=tmp_path)
    assert found.code == 2
    assert found.err.startswith("Traceback (most recent call last):\n")
    assert "\nerror[S108]: absent.yaml does not exist\n" in found.err
    assert serai("run", "absent.yaml", "-v", "--json", cwd=tmp_path).json["error"]["code"] == "S108"


def test_a_caret_under_a_set_argument(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("tinny", "tiny").replace("ten", "10"))
    found = serai("run", "--set", "train.steps=ten", cwd=tmp_path)
    assert found.code == 2
    assert "  --> --set train.steps=ten\n  |\n  | train.steps=ten\n  |             ^^^\n" in found.err


@pytest.mark.parametrize(
    ("arguments", "where", "message"),
    [
        (("runn",), "serai", "no such command 'runn'. Did you mean 'run'?"),
        (("run", "--sett", "a=1"), "serai run", "no such option: --sett (Possible options: --quiet, --set)"),
        (("run", "--set"), "serai", "option '--set' requires an argument"),
        (("run", "a.yaml", "b.yaml"), "serai run", "got unexpected extra argument(s) (b.yaml)"),
        (("stop",), "serai stop", "missing argument 'REF'"),
        (("ckpt", "list"), "serai ckpt", "no such command 'list'. Did you mean 'ls'?"),
        (("--color", "pink", "ps"), "serai", None),
        (("logs", "--rank", "-1"), "serai logs", None),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], where: str, message: str | None, tmp_path: Path) -> None:
    plain = serai(*arguments, cwd=tmp_path)
    assert (plain.code, plain.out) == (2, "")
    assert plain.err.startswith("error[S150]: ")
    assert plain.err.endswith(f"  --> {where}\n  = next: {where} --help\n")
    found = serai("--json", *arguments, cwd=tmp_path)
    assert found.code == found.json["exit_code"] == 2
    assert found.json["error"]["code"] == "S150"
    if message is not None:
        assert found.json["error"]["message"] == message


def test_colour_only_where_it_is_wanted(tmp_path: Path) -> None:
    for arguments, variables, colored in (
        (("explain", "S1"), {}, False),
        (("explain", "S1", "--color", "always"), {}, True),
        (("--color=always", "explain", "S1"), {"NO_COLOR": "1"}, True),
        (("explain", "S1", "--color", "never"), {}, False),
    ):
        found = serai(*arguments, cwd=tmp_path, **variables)
        assert found.code == 2
        assert ("\x1b[" in found.err) is colored


def test_a_mistake_in_serai_is_short_and_leaves_its_traceback(tmp_path: Path) -> None:
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(
        "import serai.spec.starter\n"
        "def create(name):\n    raise KeyError('inner')\n"
        "serai.spec.starter.create = create\n"
    )
    import os

    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    plain = serai("init", "x", cwd=tmp_path, PYTHONPATH=path, TMPDIR=str(tmp_path))
    assert (plain.code, plain.out) == (1, "")
    assert plain.err.startswith("error[S000]: serai itself failed: KeyError: 'inner'\n")
    assert "Traceback" not in plain.err
    (kept,) = tmp_path.glob("serai-traceback-*.txt")
    assert "KeyError: 'inner'" in kept.read_text()
    verbose = serai("init", "x", "-v", cwd=tmp_path, PYTHONPATH=path, TMPDIR=str(tmp_path))
    assert "Traceback (most recent call last)" in verbose.err
    found = serai("init", "x", "--json", cwd=tmp_path, PYTHONPATH=path, TMPDIR=str(tmp_path))
    assert found.code == found.json["exit_code"] == 1
    assert found.json["error"]["kind"] == "KeyError"
    assert "Traceback" in found.json["error"]["traceback"]


def test_a_reader_that_goes_away_is_no_failure(tmp_path: Path) -> None:
    import subprocess
    import sys

    with subprocess.Popen(
        [sys.executable, "-m", "serai", "explain", "job"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


class TestCarets:
    def problem(self, source: str, column: int, width: int) -> Problem:
        return Problem("S102", "m", file="f", line=1, column=column, width=width, source=source)

    def lines(self, problem: Problem) -> list[str]:
        return render_problem(problem).split("\n")[3:5]

    def test_wide_characters_take_two_cells(self) -> None:
        assert self.lines(self.problem("名前: 値だ", 5, 2)) == ["1 | 名前: 値だ", "  |       ^^^^"]

    def test_tabs_take_one(self) -> None:
        assert self.lines(self.problem("\tab", 2, 2)) == ["1 |  ab", "  |  ^^"]

    def test_control_characters_do_not_reach_the_terminal(self) -> None:
        assert self.lines(self.problem("a\x1b[31mb\u202ec", 2, 1)) == ["1 | a\ufffd[31mb\ufffdc", "  |  ^"]

    def test_a_long_line_is_cut_around_the_caret(self) -> None:
        source = "x" * 500 + "HERE" + "y" * 500
        shown, caret = self.lines(self.problem(source, 501, 4))
        start = caret.index("^")
        assert shown[start : start + 4] == "HERE"
        assert caret.count("^") == 4
        assert len(shown) <= 120

    def test_an_error_without_problems(self) -> None:
        error = SeraiError("it broke", code="S999", where="there", expected="unbroken", next_step="mend it")
        assert render_error(error) == (
            "error[S999]: it broke\n  --> there\n  = expected: unbroken\n  = next: mend it"
        )

    def test_problems_without_a_place_show_their_key(self) -> None:
        error = SpecError("changed", problems=[Problem("S127", "was 1 and is now 2", key="train.seed")])
        assert render_error(error) == "error[S127]: was 1 and is now 2\n  --> train.seed\n\nerror: changed"
