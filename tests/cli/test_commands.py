"""Every command on runs that are already there: text, JSON, exit codes, what is not found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.serai_program import serai

from serai.events import EventWriter
from serai.run.workspace import Run, Workspace
from serai.spec import resolve

JOB = """\
serai: 1
name: {name}
model: {{preset: tiny}}
data: {{corpus: shakespeare, seq_len: 64}}
train: {{steps: 40}}
"""


def make_run(folder: Path, name: str, *, status: str = "finished", steps: int = 3, **fields: Any) -> Run:
    """A run as the supervisor leaves one, without the minutes that it takes."""
    job = folder / f"{name}.yaml"
    job.write_text(JOB.format(name=name))
    spec = resolve(job)
    run = Workspace(folder / ".serai").create(name, spec_text=spec.text, resolved=spec.to_json())
    run.update(status=status, attempts=1, exit_code=0, job_file=f"{name}.yaml", note="", **fields)
    with EventWriter(run.supervisor_events) as events:
        events.write("run_started", pid=1, host="here")
        events.write("attempt_started", attempt=1, processes=2)
        events.write(
            "attempt_ended",
            attempt=1,
            status="finished",
            cause=None,
            first_failing_rank=None,
            last_step=steps,
        )
        events.write("run_ended", status=status, exit_code=0, seconds=1.0)
    with EventWriter(run.rank_events(0), rank=0, attempt=1) as events:
        for step in range(1, steps + 1):
            events.write("step", step=step, loss=5.0 - step / 4, tokens=128, seconds=0.1, tokens_per_s=1280.0)
        events.write("evaluation", step=steps, loss=4.5, tokens=100)
    log = run.log_dir(1)
    log.mkdir(parents=True)
    for rank in (0, 1):
        (log / f"rank-{rank:05d}.log").write_text(f"first of {rank}\nsecond of {rank}\nunended of {rank}")
    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three runs: alpha (failed), alpha2 and beta (finished, the newest)."""
    folder = tmp_path_factory.mktemp("commands")
    failure = {
        "cause": "user_error", "code": "S510", "words": "the training script failed", "rank": 1, "host": "here",
        "attempt": 1, "message": "ValueError: no good", "traceback": None, "log": "rank-00001.log", "advice": "fix it",
    }  # fmt: skip
    make_run(folder, "alpha", status="failed", created=1000.0, failure=failure)
    make_run(folder, "alpha2", created=2000.0)
    make_run(folder, "beta", steps=7, created=time.time() - 90)
    return folder


class TestPs:
    def test_text(self, place: Path) -> None:
        found = serai("ps", cwd=place)
        assert (found.code, found.err) == (0, "")
        lines = found.out.splitlines()
        assert lines[0].split() == ["NAME", "ID", "STATUS", "STEP", "LOSS", "CREATED"]
        assert [line.split()[0] for line in lines[1:]] == ["beta", "alpha2", "alpha"]
        assert lines[1].split()[2:] == ["finished", "7/40", "3.2500", "1", "min", "ago"]

    def test_json_lines_before_and_behind_the_command(self, place: Path, tmp_path: Path) -> None:
        workspace = str(place / ".serai")
        for arguments in (
            ("--json", "--workspace", workspace, "ps"),
            ("ps", "--json", f"--workspace={workspace}"),
            ("--workspace", workspace, "ps", "--json"),
            ("--workspace", "elsewhere", "ps", "--json", "--workspace", workspace),
        ):
            lines = serai(*arguments, cwd=tmp_path).json_lines
            assert [(line["name"], line["status"], line["step"], line["total_steps"]) for line in lines] == [
                ("beta", "finished", 7, 40),
                ("alpha2", "finished", 3, 40),
                ("alpha", "failed", 3, 40),
            ]
            assert lines[0]["loss"] == 3.25

    @pytest.mark.parametrize(
        "arguments", [("ps",), ("ps", "--json"), ("--json", "ps"), ("ps", "-q")], ids=" ".join
    )
    def test_without_a_workspace_it_prints_nothing(self, arguments: tuple[str, ...], tmp_path: Path) -> None:
        found = serai(*arguments, cwd=tmp_path)
        assert (found.code, found.out, found.err) == (0, "", "")
        assert list(tmp_path.iterdir()) == []

    def test_a_workspace_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        found = serai("ps", "--workspace", "file", "--json", cwd=tmp_path)
        assert found.code == found.json["exit_code"] == 1
        assert found.json["error"]["code"] == "S501"


class TestShow:
    def test_text(self, place: Path) -> None:
        found = serai("show", "beta", cwd=place)
        assert (found.code, found.err) == (0, "")
        words = " ".join(found.out.split())
        assert "step 7 of 40" in words
        assert "loss 3.2500" in words
        assert "validation 4.5000" in words
        assert "no save yet" in words
        assert "attempt 1 from the start, finished at step 7" in words
        assert words.endswith("next serai logs beta")

    def test_a_failed_run_says_what_to_do(self, place: Path) -> None:
        words = " ".join(serai("show", "alpha", cwd=place).out.split())
        assert "[S510] the training script failed (user_error), rank 1 on here: ValueError: no good" in words
        assert words.endswith("next serai run alpha.yaml (resumes) serai logs alpha serai explain S510")

    def test_json(self, place: Path) -> None:
        document = serai("show", "beta", "--json", cwd=place).json
        assert document["run"]["name"] == "beta"
        assert document["progress"]["last_step"] == 7
        assert document["progress"]["final_loss"] == 3.25
        assert document["spec"]["train"]["steps"] == 40

    def test_references(self, place: Path) -> None:
        ids = {line["name"]: line["id"] for line in serai("ps", "--json", cwd=place).json_lines}
        for ref, name in (("@last", "beta"), ("b", "beta"), (ids["alpha2"], "alpha2"), ("alpha", "alpha")):
            assert serai("show", ref, "--json", cwd=place).json["run"]["name"] == name
        assert serai("show", "--json", cwd=place).json["run"]["name"] == "beta"

    @pytest.mark.parametrize("command", ["show", "stop", "logs"])
    def test_an_unknown_and_an_ambiguous_reference(self, command: str, place: Path) -> None:
        for ref, words in (("gamma", "names no run"), ("al", "names more than one run")):
            plain = serai(command, ref, cwd=place)
            assert (plain.code, plain.out) == (2, "")
            assert plain.err.startswith("error[S504]: ")
            assert words in plain.err
            found = serai(command, ref, "--json", cwd=place)
            assert found.code == found.json["exit_code"] == 2
            assert "alpha" in found.json["error"]["expected"]

    @pytest.mark.parametrize("command", ["show", "logs"])
    def test_no_runs_at_all(self, command: str, tmp_path: Path) -> None:
        found = serai(command, "--json", cwd=tmp_path)
        assert found.code == 2
        assert found.json["error"]["next"] == "serai run job.yaml"


class TestLogs:
    def test_all_ranks(self, place: Path) -> None:
        found = serai("logs", "beta", cwd=place)
        assert (found.code, found.err) == (0, "")
        assert found.out.splitlines() == [
            "[0] first of 0", "[0] second of 0", "[1] first of 1", "[1] second of 1", "[0] unended of 0", "[1] unended of 1",
        ]  # fmt: skip

    def test_one_rank_has_no_prefix(self, place: Path) -> None:
        out = serai("logs", "beta", "--rank", "1", "--attempt", "1", cwd=place).out
        assert out == "first of 1\nsecond of 1\nunended of 1\n"

    def test_tail(self, place: Path) -> None:
        assert (
            serai("logs", "beta", "--rank", "0", "--tail", "1", cwd=place).out
            == "second of 0\nunended of 0\n"
        )

    def test_json_lines(self, place: Path) -> None:
        lines = serai("logs", "beta", "--rank", "0", "--json", cwd=place).json_lines
        assert lines[0] == {"schema_version": 1, "attempt": 1, "rank": 0, "line": "first of 0"}
        assert len(lines) == 3

    @pytest.mark.parametrize(
        ("arguments", "expected"), [(("--rank", "5"), "one of: 0, 1"), (("--attempt", "4"), "one of: 1")]
    )
    def test_what_is_not_there(self, arguments: tuple[str, ...], expected: str, place: Path) -> None:
        found = serai("logs", "beta", *arguments, "--json", cwd=place)
        assert found.code == 2
        assert (found.json["error"]["code"], found.json["error"]["expected"]) == ("S152", expected)

    def test_following_ends_with_the_run_and_goes_over_relaunches(self, tmp_path: Path) -> None:
        run = make_run(tmp_path, "live", status="running")
        with run.lock():
            process = subprocess.Popen(
                [sys.executable, "-m", "serai", "logs", "live", "--rank", "0", "-f", "-q"],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "first of 0\n"
            assert process.stdout.readline() == "second of 0\n"
            with open(run.log_path(1, 0), "a") as stream:
                stream.write(" now ended\n")
            assert process.stdout.readline() == "unended of 0 now ended\n"
            run.log_dir(2).mkdir()
            run.log_path(2, 0).write_text("again\n")
            assert process.stdout.readline() == "again\n"
            assert process.poll() is None
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "")


class TestStop:
    def test_a_run_that_is_over(self, place: Path) -> None:
        found = serai("stop", "beta", cwd=place)
        assert (found.code, found.out) == (0, "beta is not running (finished)\n")
        document = serai("--json", "stop", "beta", cwd=place).json
        assert (document["answer"], document["pid"]) == ("not_running", None)


class TestExplain:
    def test_a_code(self, tmp_path: Path) -> None:
        found = serai("explain", "s101", cwd=tmp_path)
        assert (found.code, found.err) == (0, "")
        assert found.out.startswith("S101  There is no such key\n\n  rule    A job file holds only keys")
        assert serai("explain", "S101", "--json", cwd=tmp_path).json["title"] == "There is no such key"

    def test_a_key_and_a_section(self, tmp_path: Path) -> None:
        out = serai("explain", "train.learning_rate", cwd=tmp_path).out
        assert (
            out
            == "train.learning_rate: a number > 0 and ≤ 10 (default 0.0003)\n  Peak learning rate of AdamW.\n"
        )
        document = serai("explain", "train.steps", "--json", cwd=tmp_path).json
        assert (document["takes"], document["required"]) == ("an integer ≥ 1", True)
        keys = [line["key"] for line in serai("explain", "parallel", "--json", cwd=tmp_path).json_lines]
        assert keys == ["parallel", "parallel.strategy"]
        everything = [line["key"] for line in serai("explain", "job", "--json", cwd=tmp_path).json_lines]
        assert {"serai", "name", "train.steps", "data.tokenizer.vocab_size", "retry.max"} <= set(everything)

    def test_the_list_of_codes(self, tmp_path: Path) -> None:
        codes = [line["code"] for line in serai("explain", "--json", cwd=tmp_path).json_lines]
        assert codes == sorted(codes)
        assert {"S101", "S150", "S504"} <= set(codes)
        assert [line.split()[0] for line in serai("explain", cwd=tmp_path).out.splitlines()] == codes

    @pytest.mark.parametrize(
        ("subject", "following"),
        [
            ("S999", "serai explain"),
            ("train.lr", "serai explain train.learning_rate"),
            ("quark", "serai explain job"),
        ],
    )
    def test_what_is_not_known(self, subject: str, following: str, tmp_path: Path) -> None:
        found = serai("explain", subject, "--json", cwd=tmp_path)
        assert found.code == 2
        assert (found.json["error"]["code"], found.json["error"]["next"]) == ("S153", following)
        assert serai("explain", subject, cwd=tmp_path).err.startswith("error[S153]: ")

    def test_the_schema(self, tmp_path: Path) -> None:
        found = serai("explain", "--schema", cwd=tmp_path)
        schema = json.loads(found.out)
        assert schema["title"] == "serai job file, version 1"
        compact = serai("explain", "--schema", "--json", cwd=tmp_path)
        assert json.loads(compact.out) == schema
        assert len(compact.out.splitlines()) == 1


class TestInit:
    def test_makes_a_folder_that_can_be_checked(self, tmp_path: Path) -> None:
        found = serai("init", "demo", cwd=tmp_path)
        assert (found.code, found.err) == (0, "")
        assert found.out.startswith("made demo\n")
        for job in ("job.yaml", "script.yaml"):
            plan = serai("run", job, "--dry-run", "--json", cwd=tmp_path / "demo").json["dry_run"]
            assert plan["action"] == "start"
        assert not (tmp_path / "demo" / ".serai").exists(), "a dry run leaves nothing"

    def test_json(self, tmp_path: Path) -> None:
        document = serai("init", "demo", "--json", cwd=tmp_path).json
        assert document["folder"] == "demo"
        assert set(document["files"]) == {path.name for path in (tmp_path / "demo").iterdir()}

    @pytest.mark.parametrize(
        ("name", "code"), [("full", "S155"), ("file", "S155"), ("a b", "S154"), ("", "S154")]
    )
    def test_refuses(self, name: str, code: str, tmp_path: Path) -> None:
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "mine.txt").write_text("mine")
        (tmp_path / "file").write_text("mine")
        before = sorted(str(path) for path in tmp_path.rglob("*"))
        found = serai("init", name, "--json", cwd=tmp_path)
        assert found.code == 2
        assert found.json["error"]["code"] == code
        assert serai("init", name, cwd=tmp_path).err.startswith(f"error[{code}]: ")
        assert sorted(str(path) for path in tmp_path.rglob("*")) == before


class TestRunWithoutRunning:
    def test_show_config_says_where_each_value_came_from(self, tmp_path: Path) -> None:
        (tmp_path / "base.yaml").write_text("train: {steps: 10, seed: 5}\nretry: {max: 9}\n")
        (tmp_path / "job.yaml").write_text(
            "serai: 1\nname: x\nextends: base.yaml\nmodel: {preset: tiny, layers: 2}\n"
            "data: {corpus: shakespeare}\ntrain: {steps: 20}\n"
        )
        found = serai("run", "--show-config", "--set", "train.learning_rate=1e-4", "--json", cwd=tmp_path)
        config = {
            entry["key"]: (entry["value"], entry["layer"], entry["where"]) for entry in found.json["config"]
        }
        assert config["train.steps"] == ("20", "job file", "job.yaml:6:16")
        assert config["train.seed"] == ("5", "extends", "base.yaml:1:26")
        assert config["retry.max"] == ("9", "extends", "base.yaml:2:14")
        assert config["train.learning_rate"] == ("0.0001", "--set", "--set:1:21")
        assert config["train.micro_batch"] == ("8", "default", None)
        assert config["model.layers"] == ("2", "job file", "job.yaml:4:31")
        assert config["model.hidden"] == ("128", "default", "preset tiny")
        lines = serai("run", "--show-config", cwd=tmp_path).out.splitlines()
        assert any(line.split() == ["train.seed", "5", "extends", "(base.yaml:1:26)"] for line in lines)

    def test_dry_run_resumes_or_shows_the_difference(self, place: Path) -> None:
        plan = serai("run", "beta.yaml", "--dry-run", "--json", cwd=place).json["dry_run"]
        assert (plan["action"], plan["status"], plan["tokens_per_step"]) == ("resume", "finished", 8 * 64)
        assert "resume beta" in serai("run", "beta.yaml", "--dry-run", cwd=place).out
        found = serai("run", "beta.yaml", "--dry-run", "--set", "train.seed=2", "--json", cwd=place)
        assert found.code == 2
        assert found.json["error"]["code"] == "S127"
        (problem,) = found.json["error"]["problems"]
        assert (problem["key"], problem["expected"]) == ("train.seed", "1")

    @pytest.mark.parametrize("command", ["run", "drill"])
    def test_a_job_that_is_not_there(self, command: str, tmp_path: Path) -> None:
        found = serai(command, "--json", cwd=tmp_path)
        assert found.code == 2
        assert found.json["error"]["code"] == "S108"
        plain = serai(command, cwd=tmp_path)
        assert (plain.code, plain.out) == (2, "")
        assert plain.err.startswith("error[S108]: job.yaml does not exist\n")
        assert list(tmp_path.iterdir()) == []


STUB = """\
import serai.run.drill as room
from serai.run.drill_report import DrillReport, FaultOutcome

def drill(spec, workspace, *, console, **_):
    console.line("words on the way")
    same = spec.document.train.seed == 1
    fault = FaultOutcome(fault="kill -9 of rank 1", at_step=5, resumed_from=4, tier="memory", lost_s=1.5)
    return DrillReport(
        identical=same, max_loss_difference=0.0 if same else 0.25, steps=10, executions=11,
        differing_steps=[] if same else [7], weights_identical=same, faults=[fault], resumes=1,
        seconds=9.0, reference_s=4.0, folder=str(workspace.path),
    )

room.drill = drill
"""


class TestDrill:
    """What the command makes of a report; the drill itself is tested in its own room."""

    @pytest.fixture
    def stubbed(self, tmp_path: Path) -> dict[str, str]:
        (tmp_path / "sitecustomize.py").write_text(STUB)
        (tmp_path / "job.yaml").write_text(JOB.format(name="x"))
        return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}

    def test_identical(self, tmp_path: Path, stubbed: dict[str, str]) -> None:
        found = serai("drill", cwd=tmp_path, **stubbed)
        assert (found.code, found.err) == (0, "words on the way\n")
        assert "kill -9 of rank 1  5        step 4" in found.out
        assert "identical: 10 steps have the same loss to the last bit" in found.out
        document = serai("drill", "--json", cwd=tmp_path, **stubbed).json
        wanted = {"identical": True, "max_loss_difference": 0.0, "resumes": 1, "seconds": 9.0, "exit_code": 0}
        assert {key: document[key] for key in wanted} == wanted
        assert [fault["resumed_from"] for fault in document["faults"]] == [4]

    def test_not_identical_fails(self, tmp_path: Path, stubbed: dict[str, str]) -> None:
        found = serai("drill", "--set", "train.seed=2", "-q", cwd=tmp_path, **stubbed)
        assert (found.code, found.err) == (1, "")
        assert "NOT identical: 1 of 10 steps, first step 7" in found.out
        document = serai("drill", "--set", "train.seed=2", "--json", cwd=tmp_path, **stubbed).json
        assert (document["identical"], document["exit_code"]) == (False, 1)


def test_version_and_help_before_and_behind(tmp_path: Path) -> None:
    from serai import __version__

    for arguments in (("--version",), ("ps", "--version"), ("ckpt", "ls", "--version")):
        assert serai(*arguments, cwd=tmp_path).out == f"serai {__version__}\n"
        assert serai(*arguments, "--json", cwd=tmp_path).json["version"] == __version__


def test_help_has_the_commands_in_the_order_of_the_work(tmp_path: Path) -> None:
    found = serai("--help", cwd=tmp_path)
    assert (found.code, found.err) == (0, "")
    assert found.out == serai(cwd=tmp_path).out
    panels: dict[str, list[str]] = {}
    for line in found.out.splitlines():
        if line and not line.startswith(" ") and line.endswith(":"):
            panels[line[:-1]] = []
        elif line.startswith("  ") and not line.startswith("   ") and panels:
            panels[list(panels)[-1]].append(line.split()[0])
    assert {title: names for title, names in panels.items() if not title.endswith("ptions")} == {
        "Start": ["init"],
        "Run": ["plan", "run", "drill", "stop"],
        "Look": ["ps", "show", "logs"],
        "Keep": ["ckpt"],
        "Explain": ["explain", "bench"],
    }
    assert all(len(line) <= 80 for line in found.out.splitlines())
    assert "..." not in found.out.split("Options:")[0].split("\n", 1)[1]
    missing = serai("--json", cwd=tmp_path)
    assert (missing.code, missing.json["error"]["code"]) == (2, "S150")
