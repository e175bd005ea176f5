"""``serai run`` on a script of one's own: real processes, real checkpoints, looked at by every command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.serai_program import serai

from serai.run.workspace import Workspace

SCRIPT = """\
import torch
import torch.distributed as dist
import serai

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
ckpt = serai.Checkpointer()
state = {"model": model}
start = ckpt.restore(state)
first = start.step + 1 if start else 1
print("from", first, flush=True)
for step in range(first, 5):
    with torch.no_grad():
        model.weight.fill_(step)
    ckpt.save(step, state, metrics={"loss": 1 / step}).wait(timeout=60)
ckpt.close()
"""
FAILING = 'raise ValueError("no good")\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "failing.py").write_text(FAILING)
    (folder / "script.yaml").write_text(
        "serai: 1\nname: mine\nscript: train.py\nresources: {processes: 2, device: cpu}\nretry: {max: 0}\n"
    )
    found = serai("run", "script.yaml", cwd=folder, timeout=180)
    assert found.code == 0, found.err
    assert found.out == "", "words about the run go to stderr"
    assert "mine finished" in found.err
    return folder


def test_running_it_again_says_that_it_is_finished(place: Path) -> None:
    document = serai("run", "script.yaml", "--json", cwd=place, timeout=180).json
    assert (document["status"], document["exit_code"], document["error"]) == ("finished", 0, None)
    assert document["durable_step"] == 4


def test_a_changed_spec_is_an_error_that_shows_the_difference(place: Path) -> None:
    found = serai("run", "script.yaml", "--set", "args=[fail]", cwd=place)
    assert (found.code, found.out) == (2, "")
    assert "error[S127]: `args` was [] and is now [fail]" in found.err


def test_a_failing_script_with_json_prints_one_object(place: Path) -> None:
    arguments = ("--set", "name=bad", "--set", "script=failing.py")
    found = serai("run", "script.yaml", *arguments, "--json", cwd=place, timeout=180)
    assert found.code == found.json["exit_code"] == 1
    assert (found.json["status"], found.json["durable_step"]) == ("failed", None)
    assert found.json["error"]["message"].endswith("ValueError: no good")
    assert found.json["error"]["code"] == "S510"


def test_a_failing_script_is_not_hidden_by_quiet(place: Path) -> None:
    arguments = ("--set", "name=bad2", "--set", "script=failing.py")
    found = serai("run", "script.yaml", *arguments, "-q", cwd=place, timeout=180)
    assert (found.code, found.out) == (1, "")
    assert "ValueError: no good" in found.err


def test_checkpoints_are_listed_shown_and_verified(place: Path) -> None:
    lines = serai("ckpt", "ls", "mine", "--json", cwd=place).json_lines
    assert [line["step"] for line in lines] == [4, 3]
    assert lines[0]["world"] == 2
    assert lines[0]["metrics"] == {"loss": 0.25}
    table = serai("ckpt", "ls", "mine", cwd=place).out.splitlines()
    assert table[0].split() == ["STEP", "SAVED", "SIZE", "RANKS", "METRICS", "GENERATION"]
    assert table[1].split()[0] == "4"

    shown = serai("ckpt", "show", "mine", "--json", cwd=place).json
    tensors = {tensor["name"]: (tensor["dtype"], tensor["shape"]) for tensor in shown["tensors"]}
    assert tensors == {"model.bias": ("float32", [3]), "model.weight": ("float32", [3, 4])}
    assert "model.weight" in serai("ckpt", "show", "mine", "--step", "3", cwd=place).out

    document = serai("ckpt", "verify", "mine", "--json", cwd=place).json
    assert (document["ok"], document["exit_code"]) == (True, 0)
    assert [generation["step"] for generation in document["generations"]] == [4, 3]
    assert serai("ckpt", "verify", "mine", cwd=place).code == 0


def test_a_folder_is_a_root_too(place: Path) -> None:
    (root,) = place.glob(".serai/runs/mine-*/checkpoints")
    relative = str(root.relative_to(place))
    for target in (relative, f"./{relative}", str(root), root.as_uri()):
        assert [line["step"] for line in serai("ckpt", "ls", target, "--json", cwd=place).json_lines] == [
            4,
            3,
        ]


def test_what_is_not_there(place: Path, tmp_path: Path) -> None:
    for command in ("ls", "show", "verify"):
        found = serai("ckpt", command, "gamma", "--json", cwd=place)
        assert found.code == found.json["exit_code"] == 2
        assert found.json["error"]["code"] == "S504"
    found = serai("ckpt", "show", "mine", "--step", "77", "--json", cwd=place)
    assert (found.code, found.json["error"]["code"]) == (1, "S401")
    assert serai("ckpt", "ls", ".", cwd=tmp_path).code == 0
    found = serai("ckpt", "verify", ".", "--json", cwd=tmp_path)
    assert (found.code, found.json["error"]["code"]) == (1, "S401")


def test_damage_is_found_and_named(place: Path, tmp_path: Path) -> None:
    import shutil

    (source,) = place.glob(".serai/runs/mine-*/checkpoints")
    root = tmp_path / "copy"
    shutil.copytree(source, root)
    (file, *_) = sorted(root.glob("step-00000004-*/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = serai("ckpt", "verify", str(root), "--json", cwd=tmp_path)
    assert found.code == found.json["exit_code"] == 1
    assert found.json["ok"] is False
    broken = {generation["step"]: generation["damage"] for generation in found.json["generations"]}
    assert broken[3] == []
    assert broken[4][0]["file"] == file.name
    plain = serai("ckpt", "verify", str(root), cwd=tmp_path)
    assert plain.code == 1
    assert "DAMAGED" in plain.out


def test_logs_and_show_of_the_real_run(place: Path) -> None:
    assert serai("logs", "mine", "--rank", "1", cwd=place).out == "from 1\n"
    document = serai("show", "mine", "--json", cwd=place).json
    assert document["run"]["status"] == "finished"
    assert document["progress"]["last_durable_step"] == 4


def test_the_script_that_init_writes_runs_over_two_processes_and_resumes_on_one(tmp_path: Path) -> None:
    """As its first lines say: launched by serai, and by hand over what that run saved."""
    serai("init", "demo", cwd=tmp_path)
    folder = tmp_path / "demo"
    small = ["--save-every", "3", "--rows", "2", "--length", "16"]
    arguments = f"args=[--steps, 7, {', '.join(small)}]"
    whole = serai("run", "script.yaml", "--set", arguments, "--json", cwd=folder, timeout=180)
    assert (whole.code, whole.json["durable_step"]) == (0, 7)
    (root,) = folder.glob(".serai/runs/*/checkpoints")
    done = subprocess.run(
        [sys.executable, "train.py", "--steps", "10", *small, "--checkpoints", str(root)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.startswith("step 10  loss ")
    newest = serai("ckpt", "ls", "--json", cwd=folder).json_lines[0]
    assert (newest["step"], newest["world"]) == (10, 1)


def test_the_job_that_init_writes_trains_and_resumes_after_a_stop(tmp_path: Path) -> None:
    """A stop request from another terminal: exit 75, then the same command goes on to the end."""
    serai("init", "demo", cwd=tmp_path)
    folder = tmp_path / "demo"
    (folder / "text").mkdir()
    for number in range(4):
        words = " ".join(f"word{(number * 7 + index) % 50}" for index in range(2000))
        (folder / "text" / f"{number}.txt").write_text(words)
    text = (folder / "job.yaml").read_text()
    (folder / "job.yaml").write_text(text.replace("corpus: shakespeare ", "text: [text] "))
    sets = [
        part
        for value in (
            "train.steps=100000", "train.micro_batch=1", "data.seq_len=16", "data.tokenizer.vocab_size=300",
            "model.layers=1", "model.hidden=16", "model.ffn=16", "train.evaluate_every=null", "resources.device=cpu",
        )
        for part in ("--set", value)
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "serai", "run", "--json", *sets],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not any(True for run in Workspace(folder / ".serai").runs() for _ in run.steps()):
            assert time.monotonic() < deadline, "no step within two minutes"
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        answer = serai("stop", "demo", "--wait", "60", "--json", cwd=folder, timeout=120)
        assert (answer.code, answer.json["answer"]) == (0, "stopped")
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert err == ""
    stopped = json.loads(out)
    assert (process.returncode, stopped["exit_code"], stopped["status"]) == (75, 75, "stopped")
    step = stopped["run"]["step"]
    assert stopped["durable_step"] == step
    words = " ".join(serai("show", cwd=folder).out.split())
    assert f"stopped at step {step}" in words
    assert (
        "serai run --set train.steps=100000" in words
        or "serai run job.yaml --set train.steps=100000" in words
    )
    assert "(resumes)" in words
    assert serai("ckpt", "ls", "--json", cwd=folder).json_lines[0]["step"] == step
