"""The configs of every room: strict for people, lenient for what a machine stored, rules all at once."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from serai.checkpoint.config import CheckpointConfig
from serai.config import Config
from serai.data.config import DataConfig
from serai.run.config import ResourcesConfig
from serai.train.config import PRESETS, ModelConfig, TrainConfig


@pytest.mark.parametrize(
    ("model", "values", "location"),
    [
        (TrainConfig, {"steps": "10"}, "steps"),
        (TrainConfig, {"steps": True}, "steps"),
        (TrainConfig, {"steps": 1.0}, "steps"),
        (TrainConfig, {"steps": 10, "learning_rate": float("nan")}, "learning_rate"),
        (TrainConfig, {"steps": 10, "stepz": 1}, "stepz"),
        (DataConfig, {"corpus": "bible"}, "corpus"),
        (DataConfig, {"corpus": "shakespeare", "seq_len": 7}, "seq_len"),
        (CheckpointConfig, {"every": "often"}, "every"),
        (ModelConfig, {"family": "gpt2"}, "family"),
    ],
)
def test_strict_for_people(model: type[Config], values: dict[str, object], location: str) -> None:
    with pytest.raises(ValidationError) as caught:
        model(**values)
    assert {error["loc"][0] for error in caught.value.errors()} == {location}


def test_lenient_for_what_a_machine_stored() -> None:
    stored = {"corpus": "shakespeare", "later": 1, "tokenizer": {"vocab_size": 512, "kind": "bpe"}}
    config = DataConfig.from_stored(stored)
    assert (config.corpus, config.tokenizer.vocab_size) == ("shakespeare", 512)
    assert stored["later"] == 1, "the caller's document is left alone"
    with pytest.raises(ValidationError):
        DataConfig.from_stored({"corpus": "shakespeare", "seq_len": "long", "later": 1})


def test_every_broken_rule_is_told_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        ModelConfig(hidden=96, heads=7, kv_heads=3)
    (error,) = caught.value.errors()
    assert [(rule.key, rule.next_step) for rule in error["ctx"]["broken"]] == [
        ("heads", "set `heads: 8`"),
        ("kv_heads", "set `kv_heads: 1`"),
    ]


def test_rules_hold_at_the_edge() -> None:
    assert TrainConfig(steps=5, warmup_steps=5).warmup_steps == 5
    with pytest.raises(ValidationError, match="6 warm-up steps"):
        TrainConfig(steps=5, warmup_steps=6)
    with pytest.raises(ValidationError, match="a moment decay of 1"):
        TrainConfig(steps=5, betas=(0.9, 1.0))
    with pytest.raises(ValidationError, match="an odd number"):
        ModelConfig(hidden=6, heads=2, kv_heads=1)
    with pytest.raises(ValidationError, match="one node only"):
        ResourcesConfig(nodes=2)
    with pytest.raises(ValidationError, match="no text to train on"):
        DataConfig()
    with pytest.raises(ValidationError, match="both `corpus` and `text`"):
        DataConfig(corpus="shakespeare", text=("a.txt",))


@pytest.mark.parametrize("preset", list(PRESETS))
def test_presets_are_whole_and_of_their_size(preset: str) -> None:
    shape = ModelConfig(preset=preset).shape()
    assert shape == PRESETS[preset]
    vocab_size = 4096 if preset in ("tiny", "small") else 128_256 if preset == "8b" else 32_000
    millions = shape.parameters(vocab_size) / 1e6
    low, high = {
        "tiny": (1, 3),
        "small": (10, 30),
        "125m": (100, 135),
        "350m": (325, 375),
        "1b": (950, 1300),
        "3b": (2800, 3300),
        "7b": (6738, 6739),
        "8b": (8030, 8031),
        "13b": (13015, 13016),
        "70b": (68900, 70600),
    }[preset]
    assert low <= millions <= high


def test_overrides_replace_the_preset() -> None:
    shape = ModelConfig(preset="tiny", layers=2, tie_embeddings=False).shape()
    assert (shape.layers, shape.tie_embeddings, shape.hidden) == (2, False, PRESETS["tiny"].hidden)
