"""Every kind of bad job file: code, exact place, caret width and hint, all problems at once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serai.errors import Problem, SpecError
from serai.spec import resolve

GOOD = """\
serai: 1
name: demo
model: {preset: tiny}
data: {corpus: shakespeare, seq_len: 64}
train:
  steps: 10
"""


@dataclass(frozen=True)
class Bad:
    """A bad job file and what must be said about it; ``^`` of the caret line stands under the source."""

    text: str
    code: str
    line: int
    column: int
    width: int
    message: str
    hint: str
    key: str | None = None
    sets: tuple[str, ...] = field(default=())


def replaced(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


BAD = {
    "unknown key, near name": Bad(
        GOOD + "  learning_rat: 1\n", "S101", 7, 3, 12, "no key `learning_rat` in `train`", "`learning_rate`", "train.learning_rat"
    ),
    "unknown key, another trainer's word": Bad(
        GOOD + "  lr: 1\n", "S101", 7, 3, 2, "no key `lr` in `train`", "perhaps you meant `learning_rate`"
    ),
    "unknown key, in the wrong section": Bad(
        GOOD + "seq_len: 8\n", "S101", 7, 1, 7, "no key `seq_len` in a job file", "`data.seq_len`, which stands under `data:`"
    ),
    "unknown key, nothing near": Bad(
        GOOD + "zzz: 8\n", "S101", 7, 1, 3, "no key `zzz`", "remove `zzz`; this version does not know it"
    ),
    "section of a later version": Bad(
        GOOD + "evaluate: {}\n", "S117", 7, 1, 8, "`evaluate` is not supported in this version", "remove `evaluate`"
    ),
    "text for a number": Bad(
        replaced("steps: 10", "steps: ten"), "S102", 6, 10, 3, "`train.steps` is the text 'ten'", "serai explain train.steps"
    ),
    "quoted number": Bad(
        replaced("steps: 10", 'steps: "10"'), "S102", 6, 10, 4, "is the text '10'", "write `steps: 10`, without quotes"
    ),
    "float for an integer": Bad(
        replaced("steps: 10", "steps: 1e3"), "S102", 6, 10, 3, "is the number 1e3", "write `steps: 1000`"
    ),
    "boolean for an integer": Bad(
        replaced("steps: 10", "steps: true"), "S102", 6, 10, 4, "is the boolean true", "serai explain train.steps"
    ),
    "YAML 1.1 boolean": Bad(
        GOOD + "checkpoint: {memory: yes}\n", "S102", 7, 22, 3, "is the text 'yes'", "write `memory: true`"
    ),
    "YAML 1.1 boolean, off": Bad(
        GOOD + "checkpoint:\n  memory: off\n", "S102", 8, 11, 3, "is the text 'off'", "write `memory: false`"
    ),
    "null where a value must be": Bad(
        replaced("steps: 10", "steps:"), "S102", 6, 9, 1, "`train.steps` is nothing", "serai explain train.steps"
    ),
    "out of range": Bad(
        replaced("seq_len: 64", "seq_len: 7"), "S113", 4, 38, 1, "`data.seq_len` is the number 7", "serai explain data.seq_len"
    ),
    "zero micro batch": Bad(
        GOOD + "  micro_batch: 0\n", "S113", 7, 16, 1, "`train.micro_batch` is the number 0", "serai explain train.micro_batch"
    ),
    "infinite": Bad(
        GOOD + "  weight_decay: .inf\n", "S113", 7, 17, 4, "is the number .inf", "serai explain train.weight_decay"
    ),
    "choice, near": Bad(
        replaced("preset: tiny", "preset: tinny"), "S113", 3, 17, 5, "is the text 'tinny'", "perhaps you meant `preset: tiny`"
    ),
    "choice, number": Bad(
        replaced("preset: tiny", "preset: 7"), "S113", 3, 17, 1, "`model.preset` is the number 7", "perhaps you meant `preset: 7b`"
    ),
    "unknown corpus": Bad(
        replaced("shakespeare,", "shakspeare,"), "S113", 4, 16, 10, "'shakspeare'", "perhaps you meant `corpus: shakespeare`"
    ),
    "union of kinds": Bad(
        GOOD + "checkpoint: {every: often}\n", "S102", 7, 21, 5, "`checkpoint.every` is the text 'often'", "serai explain checkpoint.every"
    ),
    "bad name": Bad(replaced("demo", "de/mo"), "S113", 2, 7, 5, "`name` is the text 'de/mo'", "serai explain name"),
    "list for a mapping": Bad(
        replaced("{preset: tiny}", "[tiny]"), "S102", 3, 8, 6, "`model` is a list", "serai explain model"
    ),
    "text for a list": Bad(
        replaced("corpus: shakespeare", "text: a.txt"), "S102", 4, 14, 5, "`data.text` is the text 'a.txt'", "write `text: [a.txt]`"
    ),
    "mapping for a number": Bad(
        replaced("steps: 10", "steps: {a: 1}"), "S102", 6, 3, 5, "`train.steps` is a mapping", "serai explain train.steps"
    ),
    "wrong item in a list": Bad(
        GOOD + "  betas: [0.9, high]\n", "S102", 7, 16, 4, "`train.betas.1` is the text 'high'", "serai explain train.betas"
    ),
    "item out of range": Bad(
        GOOD + "  betas: [0.9, 1.5]\n", "S114", 7, 16, 3, "a moment decay of 1.5", "set `betas: [0.9, 0.95]`"
    ),
    "list of the wrong length": Bad(
        GOOD + "  betas: [0.9]\n", "S102", 7, 10, 5, "`train.betas` is a list", "serai explain train.betas"
    ),
    "missing key": Bad(replaced("name: demo\n", ""), "S103", 1, 1, 5, "`name` is missing", "add `name: my-run`", "name"),
    "missing key in a section": Bad(
        replaced("  steps: 10", "  seed: 1"), "S103", 5, 1, 5, "`train` has no `steps`", "add `steps: 1000` under `train:`", "train.steps"
    ),
    "missing section": Bad(
        replaced("model: {preset: tiny}\n", ""), "S103", 1, 1, 5, "`model` is missing", "serai explain model", "model"
    ),
    "empty section that needs a key": Bad(
        replaced("  steps: 10\n", ""), "S103", 5, 1, 5, "`train` is missing", "serai explain train"
    ),
    "missing version": Bad(replaced("serai: 1\n", ""), "S103", 1, 1, 4, "`serai` is missing", "add `serai: 1`"),
    "wrong version": Bad(replaced("serai: 1", "serai: 2"), "S106", 1, 8, 1, "`serai` is the number 2", "--upgrade"),
    "version as text": Bad(replaced("serai: 1", "serai: one"), "S106", 1, 8, 3, "is the text 'one'", "write `serai: 1`"),
    "duplicate key": Bad(GOOD + "name: again\n", "S105", 7, 1, 4, "`name` is given twice; the first is on line 2", "remove line 2"),
    "heads do not divide": Bad(
        replaced("{preset: tiny}", "{preset: tiny, heads: 3, kv_heads: 3}"), "S114", 3, 30, 1, "3 heads do not divide a hidden width of 128", "set `heads: 4`"
    ),
    "warm-up longer than the run": Bad(
        GOOD + "  warmup_steps: 11\n", "S114", 7, 17, 2, "11 warm-up steps in a run of 10 steps", "set `warmup_steps: 1`"
    ),
    "two texts": Bad(
        replaced("corpus: shakespeare", "corpus: shakespeare, text: [job.yaml]"), "S114", 4, 35, 10, "both `corpus` and `text`", "remove `corpus`"
    ),
    "no text": Bad(replaced("corpus: shakespeare, ", ""), "S114", 4, 1, 4, "no text to train on", "add `corpus: shakespeare`"),
    "more nodes than this version has": Bad(
        GOOD + "resources: {nodes: 2}\n", "S114", 7, 20, 1, "2 nodes: this version runs on one node only", "set `nodes: 1`"
    ),
    "args without script": Bad(GOOD + "args: [a]\n", "S115", 7, 7, 3, "`args` without `script`", "add `script: train.py`"),
    "text files that are not there": Bad(
        replaced("corpus: shakespeare", "text: ['nowhere/*.txt']"), "S116", 4, 15, 15, "no file matches nowhere/*.txt", "relative to the file that holds it"
    ),
    "script that is not there": Bad(
        "serai: 1\nname: x\nscript: absent.py\n", "S116", 3, 9, 9, "the script absent.py does not exist", "relative to the file"
    ),
    "script and a section": Bad(
        "serai: 1\nname: x\nscript: job.yaml\ntrain: {steps: 1}\n", "S115", 4, 1, 5, "`train` does nothing in a job with a `script`", "remove `train`"
    ),
    "script and a key that it does not read": Bad(
        "serai: 1\nname: x\nscript: job.yaml\ncheckpoint:\n  every: 5\n", "S115", 5, 10, 1, "`checkpoint.every` does nothing", "serai.Checkpointer(...)"
    ),
    "tab": Bad(replaced("  steps", "\tsteps"), "S104", 6, 1, 1, "a tab in the indentation", "two spaces"),
    "open bracket": Bad(GOOD + "args: [a, b\n", "S104", 8, 1, 1, "expected ',' or ']'", ""),
    "value with a colon": Bad(replaced("demo", "de: mo"), "S104", 2, 9, 1, "mapping values are not allowed", ""),
    "undefined alias": Bad(replaced("demo", "*demo"), "S104", 2, 7, 1, "undefined alias", ""),
    "control character": Bad(replaced("demo", "de\x07mo"), "S104", 2, 9, 1, "U+0007", ""),
    "two documents": Bad(GOOD + "---\nserai: 1\n", "S118", 7, 1, 3, "a second YAML document", "a file of its own"),
    "foreign tag": Bad(
        replaced("name: demo", "name: !!python/object:os.system x"), "S118", 2, 7, 27, "the YAML tag", "remove the tag"
    ),
    "list as a key": Bad(GOOD + "? [a]\n: 1\n", "S118", 7, 3, 3, "a key that is a list", ""),
    "top level list": Bad("- serai: 1\n", "S107", 1, 1, 7, "a list at its top level", "serai init"),
    "empty": Bad("", "S107", 1, 1, 1, "the file holds nothing", "serai init"),
    "only comments": Bad("# later\n", "S107", 1, 1, 1, "the file holds nothing", "serai init"),
    "too deep": Bad("a: " + "[" * 60 + "]" * 60 + "\n", "S110", 1, 43, 1, "nested more than 40 deep", ""),
    "alias bomb": Bad(
        "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdef", "bcdefg", strict=True)),
        "S110", 1, 24, 1, "more than 20,000 values", "",
    ),
    "alias that contains itself": Bad("a: &a [*a]\n", "S110", 1, 4, 7, "an alias that contains itself", ""),
    "extends nothing": Bad(GOOD + "extends: base.yaml\n", "S111", 7, 10, 9, "which does not exist", "relative to the file"),
    "extends itself": Bad(GOOD + "extends: ./job.yaml\n", "S111", 7, 10, 10, "job.yaml → job.yaml", "remove `extends`"),
    "extends a list": Bad(GOOD + "extends: [a]\n", "S111", 7, 10, 3, "`extends` is a list", "write `extends: base.yaml`"),
    "extends a folder": Bad(GOOD + "extends: ..\n", "S111", 7, 10, 2, "which is a folder", "remove `extends`"),
}  # fmt: skip


def problems_of(folder: Path, text: str, *sets: str) -> list[Problem]:
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    previous = os.getcwd()
    os.chdir(folder)
    try:
        with pytest.raises(SpecError) as caught:
            resolve("job.yaml", sets)
    finally:
        os.chdir(previous)
    assert caught.value.exit_code == 2
    return caught.value.problems


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_each_kind_is_told_at_its_place(bad: Bad, tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, bad.text, *bad.sets)
    assert (problem.code, problem.file, problem.line, problem.column, problem.width) == (
        bad.code,
        "job.yaml",
        bad.line,
        bad.column,
        bad.width,
    )
    assert bad.message in problem.message
    assert bad.hint in (problem.next_step or "")
    lines = bad.text.split("\n")
    assert problem.source == lines[bad.line - 1]
    if bad.key is not None:
        assert problem.key == bad.key


def test_all_problems_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        replaced("preset: tiny", "preset: tinny").replace("steps: 10", "steps: ten\n  lr: 1")
        + "name: b\nzzz: 1\n"
    )
    found = problems_of(tmp_path, text, "retry.max=-1", "nonsense")
    assert [(problem.code, problem.file, problem.line, problem.column) for problem in found] == [
        ("S113", "job.yaml", 3, 17),
        ("S102", "job.yaml", 6, 10),
        ("S101", "job.yaml", 7, 3),
        ("S105", "job.yaml", 8, 1),
        ("S101", "job.yaml", 9, 1),
        ("S113", "--set", 1, 11),
        ("S112", "--set", 2, 1),
    ]


def test_a_rule_between_sections_is_told_beside_other_problems(tmp_path: Path) -> None:
    found = problems_of(tmp_path, "serai: 1\nname: x\ntrain: {steps: ten}\n")
    assert [(problem.code, problem.key) for problem in found] == [
        ("S103", "model"),
        ("S103", "data"),
        ("S102", "train.steps"),
    ]


@pytest.mark.parametrize(
    ("argument", "code", "column", "width", "message"),
    [
        ("train.steps=ten", "S102", 13, 3, "`train.steps` is the text 'ten'"),
        ("train.stepz=1", "S101", 7, 5, "no key `stepz` in `train`"),
        ("trian.steps=1", "S101", 1, 5, "no key `trian` in a job file"),
        ("train.steps", "S112", 1, 11, "has no `=`"),
        ("=1", "S112", 1, 1, "an empty key"),
        ("train..steps=1", "S112", 7, 1, "an empty key"),
        ("train.a b=1", "S112", 7, 3, "`a b` cannot be a key"),
        ("extends=a.yaml", "S112", 1, 7, "`extends` cannot be set"),
        ("serai=2", "S112", 1, 5, "`serai` cannot be set"),
        ("train.betas=[0.9", "S104", 17, 1, "YAML syntax"),
        ("train.betas=[0.9,2]", "S114", 18, 1, "a moment decay of 2"),
        ("a.b.c.d.e.f.g.h.i=1", "S112", 1, 17, "a key of 9 parts"),
        ("train=5", "S102", 7, 1, "`train` is the number 5"),
        ("train.steps.more=5", "S102", 7, 5, "`train.steps` is a mapping"),
        ("train.steps=1\n2", "S112", 1, 11, "several lines"),
    ],
)  # fmt: skip
def test_overrides_point_at_the_argument(
    argument: str, code: str, column: int, width: int, message: str, tmp_path: Path
) -> None:
    (problem,) = problems_of(tmp_path, GOOD, "name=ok", argument)
    assert (problem.code, problem.file, problem.line, problem.column, problem.width) == (
        code,
        "--set",
        2,
        column,
        width,
    )
    assert message in problem.message
    assert problem.source == argument


def test_a_problem_in_a_base_points_into_the_base(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "base.yaml").write_text("train:\n  steps: 10\n  seed: minus one\n")
    (problem,) = problems_of(tmp_path, replaced("train:\n  steps: 10\n", "extends: bases/base.yaml\n"))
    assert (problem.file, problem.line, problem.column) == ("bases/base.yaml", 3, 9)
    assert problem.source == "  seed: minus one"


def test_a_circle_of_three_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    (problem,) = problems_of(tmp_path, GOOD + "extends: a.yaml\n")
    assert (problem.code, problem.file, problem.line, problem.column) == ("S111", "b.yaml", 1, 10)
    assert problem.message.endswith("a.yaml → b.yaml → a.yaml")


def test_a_chain_without_end_is_cut(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    (tmp_path / "20.yaml").write_text("retry: {max: 1}\n")
    (problem,) = problems_of(tmp_path, GOOD + "extends: 0.yaml\n")
    assert (problem.code, problem.message) == ("S111", "a chain of more than 16 files that extend each other")


class TestFilesThatCannotBeRead:
    def only(self, path: Path) -> Problem:
        with pytest.raises(SpecError) as caught:
            resolve(path)
        (problem,) = caught.value.problems
        assert caught.value.code == problem.code
        return problem

    def test_missing(self, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_text(GOOD)
        problem = self.only(tmp_path / "jb.yaml")
        assert (problem.code, problem.next_step) == ("S108", f"give {tmp_path / 'job.yaml'}")

    def test_missing_with_nothing_near(self, tmp_path: Path) -> None:
        problem = self.only(tmp_path / "job.yaml")
        assert problem.code == "S108"
        assert "serai init" in str(problem.next_step)

    def test_folder(self, tmp_path: Path) -> None:
        (tmp_path / "job.yaml").write_text(GOOD)
        problem = self.only(tmp_path)
        assert (problem.code, problem.next_step) == ("S108", f"give {tmp_path / 'job.yaml'}")

    def test_not_an_ordinary_file(self) -> None:
        assert self.only(Path(os.devnull)).code == "S108"

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_no_permission(self, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(GOOD)
        path.chmod(0)
        problem = self.only(path)
        assert (problem.code, problem.next_step) == ("S108", f"chmod u+r {path}")

    def test_no_permission_as_told_by_the_system(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(GOOD)

        def denied(*_: object) -> object:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr("serai.spec.source.open", denied, raising=False)
        problem = self.only(path)
        assert (problem.code, problem.next_step) == ("S108", f"chmod u+r {path}")

    def test_not_utf8(self, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_bytes("serai: 1\nname: café\n".encode("latin-1"))
        problem = self.only(path)
        assert (problem.code, problem.line, problem.column) == ("S109", 2, 10)
        assert "byte 0xe9 at offset 18" in problem.message

    def test_too_large(self, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_text(GOOD + "# filler\n" * 40_000)
        assert self.only(path).code == "S110"

    def test_too_many_values(self, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_text("args: [" + "1," * 60_000 + "]\n")
        assert self.only(path).code == "S110"

    def test_byte_order_mark_and_windows_line_ends_are_fine(self, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
        assert resolve(path).name == "demo"


WORDS = st.sampled_from(
    [
        "serai: 1", "name: x", "name:", "train:", "  steps: 3", " steps: [", "model: {preset: tiny}", "data: {corpus: shakespeare}",
        "script: a.py", "args: [1, 2]", "checkpoint: {every: 1", "}", "- a", "&a", "*a", "<<: *a", "? [x]", ": y", "!!str 3", "|",
        "  text", "\tb: c", "'", '"', "#", "---", "%YAML 1.2", "extends: job.yaml", "train: 5", "retry: {max: -1}", "null", "\u00e9: \u4f60", "\x00",
    ]
)  # fmt: skip


@given(st.lists(WORDS, max_size=12) | st.text(max_size=60).map(lambda text: [text]))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_text_gives_a_job_or_problems_with_places(tmp_path: Path, lines: list[str]) -> None:
    """Nothing but ``SpecError`` comes out, and every caret stands inside of a line of the file."""
    path = tmp_path / "job.yaml"
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass", newline="")
    for problem in problems_or_none(path):
        assert problem.message
        assert problem.code.startswith("S1")
        if problem.line is not None and problem.code != "S109":
            assert problem.column is not None
            assert problem.source is not None
            assert 1 <= problem.column <= len(problem.source) + 1
            assert problem.column - 1 + problem.width <= max(len(problem.source), problem.column)


@given(st.text(max_size=40) | st.lists(WORDS, max_size=3).map("=".join))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_override_gives_a_job_or_problems(tmp_path: Path, argument: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    assert all(problem.file == "--set" for problem in problems_or_none(path, argument, "train.steps=3"))


def problems_or_none(path: Path, *sets: str) -> list[Problem]:
    try:
        resolve(path, sets)
    except SpecError as error:
        return error.problems or pytest.fail("an error without a problem")
    return []


@pytest.mark.parametrize("end", ["\r", "\r\n", "\x85", "\u2028"])
def test_lines_are_counted_as_yaml_counts_them(end: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD.replace("steps: 10", "steps: ten").replace("\n", end), encoding="utf-8", newline="")
    (problem,) = problems_or_none(path)
    assert (problem.line, problem.column, problem.source) == (6, 10, "  steps: ten")
