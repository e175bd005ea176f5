"""What a good job file means: scalars, extends, overrides, provenance, the stored form."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serai.errors import SpecError
from serai.spec import JobSpec, load_resolved, resolve
from serai.spec.source import Reader, scalar_value
from serai.spec.tree import Layer, Mapping, Node, Scalar, Sequence, merge

DESIGN = """\
serai: 1
name: demo
model: {family: llama, preset: small}
data: {corpus: shakespeare, seq_len: 256}
train: {steps: 300, micro_batch: 8, learning_rate: 3.0e-4, seed: 1}
parallel: {strategy: fsdp2}
checkpoint: {every: 20}
resources: {nodes: 1, processes: 2}
retry: {max: 5}
"""


def write(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_example_of_the_design(tmp_path: Path) -> None:
    spec = resolve(write(tmp_path, DESIGN))
    job = spec.document
    assert (spec.name, spec.text, spec.folder) == ("demo", DESIGN, tmp_path)
    assert job.model is not None
    assert job.data is not None
    assert job.train is not None
    assert job.parallel is not None
    assert (job.model.preset, job.data.seq_len, job.train.learning_rate) == ("small", 256, 3e-4)
    assert (job.parallel.strategy, job.checkpoint.every, job.resources.processes) == ("fsdp2", 20, 2)
    assert job.retry.max == 5
    assert job.train.betas == (0.9, 0.95), "a default"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), ("3E4", 3e4), (".5", 0.5), ("5.", 5.0), ("-1", -1), ("+7", 7), ("1_000", 1000), ("0x10", 16),
        ("0o10", 8), ("010", 10), ("true", True), ("FALSE", False), ("null", None), ("~", None), ("", None),
        ("yes", "yes"), ("no", "no"), ("on", "on"), ("off", "off"), ("y", "y"), ("1:30", "1:30"), ("2026-12-01", "2026-12-01"),
        ("1e", "1e"), ("e5", "e5"), ("1.2.3", "1.2.3"), ("0x", "0x"), ("_1", "_1"), ("-", "-"), (".", "."), ("<<", "<<"),
        (".inf", float("inf")), ("-.INF", float("-inf")),
    ],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    found = scalar_value(text)
    assert found == value
    assert type(found) is type(value)


def test_a_key_that_takes_text_takes_it_as_written(tmp_path: Path) -> None:
    write(tmp_path, "print()\n", "on")
    path = write(
        tmp_path, "serai: 1\nname: 007\nscript: on\nargs: [--lr, 3e-4, 1_0, no, true, '5', \"x y\", ~x]\n"
    )
    job = resolve(path).document
    assert job.name == "007"
    assert job.script == str(tmp_path / "on")
    assert job.args == ("--lr", "3e-4", "1_0", "no", "true", "5", "x y", "~x")


def test_numbers_of_every_spelling(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "serai: 1\nname: x\nmodel: {preset: tiny}\ndata: {corpus: shakespeare}\n"
        "train: {steps: 1_000, learning_rate: 3e-4, weight_decay: 0, betas: [.9, 95e-2], clip_norm: null}\n",
    )
    train = resolve(path).document.train
    assert train is not None
    assert (train.steps, train.learning_rate, train.weight_decay) == (1000, 3e-4, 0)
    assert (train.betas, train.clip_norm) == ((0.9, 0.95), None)


def test_anchors_aliases_and_merge_keys(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "serai: 1\nname: x\nmodel: &m {preset: tiny}\ndata: {corpus: shakespeare, tokenizer: {<<: {}}}\n"
        "train: &t\n  steps: &n 10\n  warmup_steps: *n\n  seed: 4\n"
        "retry: {<<: [{max: 7}, {max: 8}]}\n",
    )
    job = resolve(path).document
    assert job.train is not None
    assert (job.train.steps, job.train.warmup_steps) == (10, 10)
    assert job.retry.max == 7, "the first of several merged mappings wins, as YAML has it"


def test_a_section_with_every_line_commented_out_has_its_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, DESIGN.replace("checkpoint: {every: 20}", "checkpoint:\n#  every: 20"))
    assert resolve(path).document.checkpoint.every == 100


class TestExtends:
    def test_mappings_merge_lists_are_replaced_the_nearer_file_wins(self, tmp_path: Path) -> None:
        write(tmp_path, "train: {steps: 1, seed: 1, betas: [0.1, 0.2]}\nretry: {max: 1}\n", "a/base.yaml")
        write(tmp_path, "extends: base.yaml\ntrain: {seed: 2, betas: [0.3, 0.4]}\n", "a/middle.yaml")
        path = write(
            tmp_path,
            "serai: 1\nname: x\nextends: a/middle.yaml\nmodel: {}\ndata: {corpus: shakespeare}\ntrain: {steps: 3}\n",
        )
        job = resolve(path).document
        assert job.train is not None
        assert (job.train.steps, job.train.seed, job.train.betas, job.retry.max) == (3, 2, (0.3, 0.4), 1)

    def test_null_takes_an_inherited_value_back(self, tmp_path: Path) -> None:
        write(tmp_path, DESIGN.replace("every: 20", "every: 20, keep_every: 5"), "base.yaml")
        path = write(tmp_path, "extends: base.yaml\ncheckpoint: {keep_every: null}\n")
        assert resolve(path).document.checkpoint.keep_every is None

    def test_relative_paths_start_from_the_file_that_holds_them(self, tmp_path: Path) -> None:
        write(tmp_path, "words", "base/text/one.txt")
        write(
            tmp_path,
            "data: {text: ['text/*.txt']}\ncheckpoint: {root: saves, local: s3://b/c}\n",
            "base/base.yaml",
        )
        path = write(
            tmp_path,
            "serai: 1\nname: x\nextends: ../base/base.yaml\nmodel: {}\ntrain: {steps: 1}\n",
            "job/job.yaml",
        )
        job = resolve(path).document
        assert job.data is not None
        assert job.data.text == (str(tmp_path / "base/text/*.txt"),)
        assert (job.checkpoint.root, job.checkpoint.local) == (str(tmp_path / "base/saves"), "s3://b/c")

    def test_a_script_and_a_set_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path, "print()", "job/train.py")
        path = write(tmp_path, "serai: 1\nname: x\nscript: train.py\n", "job/job.yaml")
        monkeypatch.chdir(tmp_path)
        assert resolve(path).document.script == str(tmp_path / "job/train.py")
        assert resolve(path, ["checkpoint.root=here"]).document.checkpoint.root == str(tmp_path / "here")


class TestOverrides:
    def test_the_spec_types_them(self, tmp_path: Path) -> None:
        path = write(tmp_path, DESIGN)
        sets = [
            "name=123",
            "train.learning_rate=1e-3",
            "train.betas=[0.8, 0.9]",
            "checkpoint.every=auto",
            "checkpoint.keep_every=7",
            "checkpoint.memory=false",
            "train.clip_norm=null",
            "train.seed=1",
            "train.seed=2",
            "parallel={strategy: ddp}",
            "checkpoint.root=null",
        ]
        job = resolve(path, sets).document
        assert job.train is not None
        assert job.parallel is not None
        assert (job.name, job.train.learning_rate, job.train.betas) == ("123", 1e-3, (0.8, 0.9))
        assert (job.checkpoint.every, job.checkpoint.keep_every, job.checkpoint.memory) == ("auto", 7, False)
        assert (job.train.clip_norm, job.train.seed, job.parallel.strategy) == (None, 2, "ddp")
        assert job.checkpoint.root is None

    def test_a_set_value_with_yaml_in_it_is_text_where_text_is_wanted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write(tmp_path, "", "a: b#{.py")
        path = write(tmp_path, "serai: 1\nname: x\nscript: job.yaml\n")
        assert resolve(path, ["script=a: b#{.py"]).document.script == str(tmp_path / "a: b#{.py")


def test_provenance_of_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "retry: {max: 2}\n", "base.yaml")
    write(tmp_path, DESIGN.replace("retry: {max: 5}", "extends: base.yaml"))
    spec = resolve("job.yaml", ["train.seed=9"])
    provenance = {key: (entry.value, entry.layer, entry.where) for key, entry in spec.provenance.items()}
    assert provenance["retry.max"] == ("2", Layer.EXTENDS, "base.yaml:1:14")
    assert provenance["train.seed"] == ("9", Layer.SET, "--set:1:12")
    assert provenance["train.steps"] == ("300", Layer.JOB_FILE, "job.yaml:5:16")
    assert provenance["train.epsilon"] == ("1e-08", Layer.DEFAULT, "")
    assert provenance["model.heads"] == ("6", Layer.DEFAULT, "preset small")

    def leaves(document: Any, prefix: str = "") -> set[str]:
        if isinstance(document, dict):
            return {
                leaf
                for key, value in document.items()
                for leaf in leaves(value, f"{prefix}.{key}" if prefix else key)
            }
        return {prefix}

    assert set(provenance) == leaves(spec.document.to_json())


class TestStored:
    def test_comes_back_whole(self, tmp_path: Path) -> None:
        spec = resolve(write(tmp_path, DESIGN))
        stored = tmp_path / "resolved.json"
        stored.write_text(json.dumps(spec.to_json()))
        again = load_resolved(stored)
        assert again.to_json() == spec.document.to_json()
        assert spec.to_json()["model"]["heads"] == 6, (
            "the preset is spelled out, so that it cannot change later"
        )

    def test_a_script_comes_back_too(self, tmp_path: Path) -> None:
        path = write(tmp_path, "serai: 1\nname: x\nscript: job.yaml\nargs: [a]\ncheckpoint: {root: s3://b}\n")
        spec = resolve(path)
        stored = write(tmp_path, json.dumps(spec.to_json()), "resolved.json")
        assert load_resolved(stored).to_json() == spec.document.to_json()
        assert "train" not in spec.to_json()

    def test_keys_of_another_version_are_left_out(self, tmp_path: Path) -> None:
        document = resolve(write(tmp_path, DESIGN)).to_json()
        document["later"] = {"a": 1}
        document["train"]["later"] = 1
        document["data"]["tokenizer"]["later"] = 1
        loaded = load_resolved(write(tmp_path, json.dumps(document), "resolved.json"))
        assert loaded.name == "demo"

    @pytest.mark.parametrize(
        "text", ["", "[]", "{}", '{"serai": 1, "name": "x", "train": {"steps": "x"}}', "3"]
    )
    def test_damage_is_an_error(self, text: str, tmp_path: Path) -> None:
        with pytest.raises(SpecError) as caught:
            load_resolved(write(tmp_path, text, "resolved.json"))
        assert caught.value.code == "S126"

    def test_a_missing_file_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="S126"):
            load_resolved(tmp_path / "resolved.json")


KEYS = st.sampled_from(["a", "b", "c", "d"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.lists(st.integers(0, 3), max_size=3)
    | st.text("xy", max_size=3)
)
TREES = st.dictionaries(
    KEYS,
    st.recursive(LEAVES, lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=8),
    max_size=4,
)


def parse(document: dict[str, Any]) -> Mapping:
    from serai.spec.tree import Source

    text = yaml.safe_dump(document)
    reader = Reader()
    node = reader.read_value(text, Source("t", tuple(text.split("\n")), "/", Layer.JOB_FILE), 1)
    assert reader.problems == []
    assert isinstance(node, Mapping)
    return node


def plain(node: Node) -> Any:
    if isinstance(node, Mapping):
        return {key: plain(entry.value) for key, entry in node.entries.items()}
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    assert isinstance(node, Scalar)
    return node.value


def merged(weak: dict[str, Any], strong: dict[str, Any]) -> dict[str, Any]:
    result = dict(weak)
    for key, value in strong.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


@given(TREES)
@settings(deadline=None)
def test_reading_gives_what_was_written(document: dict[str, Any]) -> None:
    assert plain(parse(document)) == document


@given(TREES, TREES, TREES)
@settings(deadline=None)
def test_merging_is_what_it_says_and_associative(
    a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]
) -> None:
    first, second, third = parse(a), parse(b), parse(c)
    assert plain(merge(first, second)) == merged(a, b)
    assert plain(merge(first, first)) == a

    def shape_stable(x: Any, y: Any) -> bool:
        """Whether no key is a mapping in one and something else in the other; only then is merging associative."""
        if isinstance(x, dict) and isinstance(y, dict):
            return all(shape_stable(x[key], y[key]) for key in x.keys() & y.keys())
        return not isinstance(x, dict) and not isinstance(y, dict)

    if shape_stable(a, b) and shape_stable(b, c) and shape_stable(a, c):
        left = merge(merge(first, second), third)
        assert plain(left) == plain(merge(first, merge(second, third)))


NUMBERS = {
    "train.steps": st.integers(20, 10**6),
    "train.micro_batch": st.integers(1, 512),
    "train.learning_rate": st.floats(1e-8, 10, allow_subnormal=False),
    "train.seed": st.integers(0, 2**32 - 1),
    "data.seq_len": st.integers(8, 4096),
    "checkpoint.every": st.integers(1, 1000) | st.just("auto"),
    "checkpoint.memory": st.booleans(),
    "resources.processes": st.integers(1, 64),
    "parallel.strategy": st.sampled_from(["ddp", "fsdp2"]),
    "train.clip_norm": st.none() | st.floats(0.1, 100),
}


@given(st.fixed_dictionaries({}, optional=NUMBERS))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_set_gives_exactly_what_the_file_would(tmp_path: Path, values: dict[str, Any]) -> None:
    base = {
        "serai": 1,
        "name": "x",
        "model": {"preset": "tiny"},
        "data": {"corpus": "shakespeare"},
        "train": {"steps": 50},
    }
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
    write(tmp_path, yaml.safe_dump(base), "plain.yaml")
    write(tmp_path, yaml.safe_dump(merged(base, nested)), "whole.yaml")
    sets = [f"{key}={json.dumps(value) if value != 'auto' else value}" for key, value in values.items()]
    by_set = resolve(tmp_path / "plain.yaml", [text.replace('"', "") for text in sets]).document
    assert by_set == resolve(tmp_path / "whole.yaml").document
    assert JobSpec.from_stored(by_set.to_json()).to_json() == by_set.to_json()


def test_the_working_folder_is_left_alone(tmp_path: Path) -> None:
    before = os.getcwd()
    resolve(write(tmp_path, DESIGN), ["train.seed=3"])
    assert os.getcwd() == before
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]
