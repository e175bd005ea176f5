"""Shapes from Hugging Face configs (as plain dicts) and from modules on the meta device."""

from __future__ import annotations

from typing import Any

import pytest

from serai.errors import SpecError
from serai.plan import Cluster, Layout, Model, predict

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False}  # fmt: skip


def test_configs() -> None:
    assert Model.from_hf_config(LLAMA).params == pytest.approx(8.03e9, rel=0.002)
    gpt2 = Model.from_hf_config(
        {
            "model_type": "gpt2",
            "n_embd": 1600,
            "n_layer": 48,
            "n_head": 25,
            "vocab_size": 50257,
            "n_positions": 1024,
        }
    )
    assert gpt2.params == pytest.approx(1.558e9, rel=0.002)
    mixtral = Model.from_hf_config(
        {
            **LLAMA,
            "model_type": "mixtral",
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        }
    )
    assert (mixtral.arch, mixtral.experts, mixtral.top_k) == ("moe", 8, 2)
    assert mixtral.params == pytest.approx(46.7e9, rel=0.002)
    vit = Model.from_hf_config(
        {
            "model_type": "vit",
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "patch_size": 16,
        }
    )
    assert vit.arch == "vit"
    assert vit.params == pytest.approx(86.6e6, rel=0.01)
    falcon = Model.from_hf_config(
        {
            "model_type": "falcon",
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "multi_query": True,
            "vocab_size": 65024,
        }
    )
    assert falcon.kv_heads == 1
    with pytest.raises(SpecError) as caught:
        Model.from_hf_config({"hidden": 3})
    assert caught.value.code == "S134"
    with pytest.raises(SpecError):
        Model.from_hf_config(7)


def test_a_module_on_the_meta_device() -> None:
    torch = pytest.importorskip("torch")
    nn: Any = torch.nn

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.n_heads = 8
            self.qkv = nn.Linear(512, 3 * 512)
            self.out = nn.Linear(512, 512)
            self.up = nn.Linear(512, 2048)
            self.down = nn.Linear(2048, 512)

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32000, 512)
            self.blocks = nn.ModuleList(Block() for _ in range(6))
            self.head = nn.Linear(512, 32000, bias=False)
            self.head.weight = self.embed.weight

    with torch.device("meta"):
        net = Net()
    model = Model.from_module(net)
    assert model.params == sum(p.numel() for p in net.parameters())
    assert (model.layers, model.hidden, model.heads, model.ffn, model.vocab) == (6, 512, 8, 2048, 32000)
    assert predict(model, Cluster.named("rtx-4090", 1, 1), Layout()).fits
    with pytest.raises(SpecError):
        Model.from_module(nn.LayerNorm(3))
