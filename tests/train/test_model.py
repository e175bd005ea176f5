"""The model: Hugging Face's layout, and weights that depend on the seed alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

from serai.train.config import ModelConfig, TrainConfig
from serai.train.model import build_model, count_parameters, llama_config, materialise, sum_of_losses
from serai.train.optimizer import WarmupCosine, build_optimizer

CPU = torch.device("cpu")
TINY = ModelConfig(preset="tiny", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64)


def _model(config: ModelConfig = TINY, *, seed: int = 1) -> LlamaForCausalLM:
    model = build_model(llama_config(config, vocab_size=100, seq_len=16, end_of_text=0))
    materialise(model, device=CPU, seed=seed)
    assert isinstance(model, LlamaForCausalLM)
    return model


def test_it_is_the_hugging_face_model_with_its_names() -> None:
    model = _model()
    names = dict(model.named_parameters())
    assert "model.layers.1.self_attn.q_proj.weight" in names
    assert "lm_head.weight" not in names
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tuple(names["model.layers.0.self_attn.k_proj.weight"].shape) == (16, 32)
    assert model.config._attn_implementation == "sdpa"


def test_an_untied_output_layer_has_weights_of_its_own() -> None:
    tied, untied = _model(), _model(TINY.model_copy(update={"tie_embeddings": False}))
    assert count_parameters(untied) == count_parameters(tied) + 100 * 32
    assert not torch.equal(untied.lm_head.weight, untied.model.embed_tokens.weight)


@pytest.mark.parametrize("preset", ["tiny", "small", "125m"])
def test_the_parameter_count_is_the_one_that_the_config_predicts(preset: str) -> None:
    config = ModelConfig.model_validate({"preset": preset})
    model = build_model(llama_config(config, vocab_size=4096, seq_len=128, end_of_text=0))
    assert count_parameters(model) == config.shape().parameters(4096)


def test_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    torch.manual_seed(5)
    first = _model()
    torch.manual_seed(6)
    again, other = _model(), _model(seed=2)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.ndim == 1 or not torch.equal(a, c), name


def test_first_weights_have_the_documented_spread() -> None:
    model = _model(ModelConfig(preset="tiny", layers=8, hidden=128, heads=4, kv_heads=4, ffn=256))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    # The deviation of n normal values is known to about 1 / sqrt(2 n).
    assert float(weights["model.layers.3.mlp.up_proj.weight"].std()) == pytest.approx(0.02, rel=0.03)
    assert float(weights["model.layers.3.mlp.down_proj.weight"].std()) == pytest.approx(0.02 / 4, rel=0.03)
    assert float(weights["model.layers.3.self_attn.o_proj.weight"].std()) == pytest.approx(0.02 / 4, rel=0.03)
    assert float(weights["model.embed_tokens.weight"].std()) == pytest.approx(0.02, rel=0.03)
    assert torch.equal(weights["model.norm.weight"], torch.ones(128))


def test_the_rotary_buffers_are_those_of_the_constructor() -> None:
    model = _model()
    fresh = LlamaRotaryEmbedding(model.config)
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh.inv_freq)
    assert torch.equal(model.model.rotary_emb.original_inv_freq, fresh.original_inv_freq)


def test_the_summed_loss_is_hugging_faces_mean_times_its_tokens() -> None:
    model = _model()
    tokens = torch.randint(0, 100, (3, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mean = model(input_ids=tokens, labels=tokens).loss
        total = sum_of_losses(model, tokens[:, :-1], tokens[:, 1:])
    assert float(total) == pytest.approx(float(mean) * 3 * 16, rel=1e-6)
    assert float(total) / 48 == pytest.approx(math.log(100), rel=0.05)


def test_padding_adds_nothing() -> None:
    model = _model()
    inputs = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = inputs.roll(-1, dims=1).clone()
    labels[0, 5:] = -100
    nothing = torch.full_like(labels, -100)
    with torch.no_grad():
        logits = model(input_ids=inputs).logits
        total = sum_of_losses(model, inputs, labels)
        padded = sum_of_losses(model, torch.cat([inputs, inputs]), torch.cat([labels, nothing]))
        empty = sum_of_losses(model, inputs, nothing)
    kept = labels != -100
    by_hand = functional.cross_entropy(logits[kept], labels[kept], reduction="sum")
    assert float(total) == pytest.approx(float(by_hand), rel=1e-6)
    assert float(padded) == pytest.approx(float(total), rel=1e-6)
    assert float(empty) == 0.0


def test_matrices_decay_and_norms_do_not() -> None:
    model = _model()
    optimizer = build_optimizer(model, TrainConfig(steps=10, weight_decay=0.3))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == (0.0 if name.endswith("norm.weight") else 0.3), name


def test_the_schedule_rises_to_its_peak_and_falls_to_its_floor() -> None:
    optimizer = build_optimizer(_model(), TrainConfig(steps=10))
    schedule = WarmupCosine(optimizer, peak=1.0, warmup=4, steps=11, floor=0.1)
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.55)
    assert rates[10] == pytest.approx(0.1)
    resumed = WarmupCosine(optimizer, peak=1.0, warmup=4, steps=11, floor=0.1)
    resumed.load_state_dict({"step": 7})
    assert optimizer.param_groups[0]["lr"] == optimizer.param_groups[1]["lr"] == rates[7]
    assert resumed.state_dict() == {"step": 7}
