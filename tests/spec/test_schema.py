"""The JSON Schema says the same as the reader, and so does the reference of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.spec.test_resolve import DESIGN

from serai.errors import SpecError
from serai.spec import job_schema, resolve
from serai.spec.fields import find_key, list_keys, suggest_key
from serai.spec.starter import create

ROOT = Path(__file__).parents[2]
SCHEMA = job_schema()
EXAMPLES = sorted(ROOT.glob("examples/*.yaml"))


def accepts(document: Any) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(document)


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_hold(path: Path) -> None:
    assert accepts(yaml.safe_load(path.read_text()))
    assert resolve(path).document.serai == 1


def test_there_are_examples() -> None:
    assert EXAMPLES


GOOD = {
    "design": DESIGN,
    "extends alone": "extends: base.yaml\n",
    "script": "serai: 1\nname: x\nscript: job.yaml\nargs: [a, 3, true]\n",
    "empty section": DESIGN.replace("{every: 20}", ""),
    "auto": DESIGN.replace("every: 20", "every: auto"),
    "own text": DESIGN.replace("corpus: shakespeare", "text: [job.yaml]"),
}
BAD = {
    "unknown key": DESIGN + "zzz: 1\n",
    "later section": DESIGN + "evaluate: {}\n",
    "wrong kind": DESIGN.replace("steps: 300", "steps: lots"),
    "out of range": DESIGN.replace("seq_len: 256", "seq_len: 2"),
    "choice": DESIGN.replace("fsdp2", "fsdp3"),
    "no name": DESIGN.replace("name: demo\n", ""),
    "no steps": DESIGN.replace("steps: 300, ", ""),
    "no model": DESIGN.replace("model: {family: llama, preset: small}\n", ""),
    "wrong version": DESIGN.replace("serai: 1", "serai: 2"),
    "script and train": "serai: 1\nname: x\nscript: job.yaml\ntrain: {steps: 1}\n",
    "args without script": DESIGN + "args: [a]\n",
    "bad name": DESIGN.replace("name: demo", "name: de mo"),
    "list": "- 1\n",
}


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD.keys())
def test_what_the_reader_takes_the_schema_takes(text: str, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(DESIGN)
    (tmp_path / "job.yaml").write_text(text)
    resolve(tmp_path / "job.yaml")
    assert accepts(yaml.safe_load(text))


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_what_the_schema_refuses_the_reader_refuses(text: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(SpecError):
        resolve(tmp_path / "job.yaml")
    assert not accepts(yaml.safe_load(text))


class TestStarter:
    def test_every_job_it_makes_holds(self, tmp_path: Path) -> None:
        made = create(str(tmp_path / "deep" / "demo"))
        assert set(made.files) == {path.name for path in made.folder.iterdir()}
        for name, runs in (("job.yaml", "demo"), ("script.yaml", "demo-script")):
            text = (made.folder / name).read_text()
            assert text.startswith("# yaml-language-server: $schema=./serai.schema.json\n")
            assert accepts(yaml.safe_load(text))
            assert resolve(made.folder / name).name == runs
        assert list((tmp_path / "deep").iterdir()) == [made.folder], "nothing else is left beside it"

    def test_an_empty_folder_is_filled(self, tmp_path: Path) -> None:
        (tmp_path / "demo").mkdir()
        assert (create(str(tmp_path / "demo")).folder / "job.yaml").is_file()

    def test_nothing_is_left_when_it_fails_half_way(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> object:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("serai.spec.starter.job_schema", full)
        with pytest.raises(Exception, match=r"S230.*No space left") as caught:
            create(str(tmp_path / "demo"))
        assert getattr(caught.value, "exit_code", None) == 1
        assert list(tmp_path.iterdir()) == []


class TestKeys:
    def test_every_key_is_described(self) -> None:
        keys = list_keys()
        assert len({key.path for key in keys}) == len(keys)
        for key in keys:
            assert key.description.endswith("."), key.path
            assert "Annotated" not in key.kind, key.path
            assert "<" not in key.kind.replace("< ", ""), key.path

    @pytest.mark.parametrize(
        ("path", "kind", "default"),
        [
            ("train.steps", "an integer ≥ 1", None),
            ("train.learning_rate", "a number > 0 and ≤ 10", "0.0003"),
            ("train.betas", "a list of 2 numbers", "[0.9, 0.95]"),
            ("train.clip_norm", "a number > 0 or null", "1"),
            ("checkpoint.every", "an integer ≥ 1 or auto", "100"),
            ("checkpoint.memory", "true or false", "true"),
            ("parallel.strategy", "ddp or fsdp2", "fsdp2"),
            ("data.text", "a list of text or null", "null"),
            ("args", "a list of text", "[]"),
            ("train", "a mapping", None),
        ],
    )
    def test_what_it_takes(self, path: str, kind: str, default: str | None) -> None:
        key = find_key(path)
        assert key is not None
        assert (key.kind, key.default) == (kind, default)

    @pytest.mark.parametrize(
        ("written", "meant"),
        [
            ("train.learning_rte", "train.learning_rate"),
            ("train.learning-rate", "train.learning_rate"),
            ("learning_rate", "train.learning_rate"),
            ("train.lr", "train.learning_rate"),
            ("model.steps", "train.steps"),
            ("train.batch_size", "train.micro_batch"),
            ("trian", "train"),
            ("model.n_layers", "model.layers"),
            ("xyzzy", None),
        ],
    )
    def test_nearest_name(self, written: str, meant: str | None) -> None:
        assert suggest_key(written) == meant
        assert meant is None or find_key(meant) is not None
