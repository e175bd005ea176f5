"""Model shapes by name, for the command line. Public shapes, written out; no download."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from serai.errors import SpecError
from serai.plan.model import Model

__all__ = ["MODELS", "named_model"]


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200) -> Model:
    return Model("gpt", layers, hidden, heads, heads, 4 * hidden, vocab, name=name)


def _llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> Model:
    return Model("llama", layers, hidden, heads, kv_heads, ffn, vocab, name=name)


_ALL = (
    _gpt("gpt2", 12, 768, 12, 50257),
    _gpt("gpt2-xl", 48, 1600, 25, 50257),
    _gpt("gpt-22b", 48, 6144, 64),
    _gpt("gpt-175b", 96, 12288, 96),
    _gpt("gpt-530b", 105, 20480, 128),
    _gpt("gpt-1t", 128, 25600, 160),
    _gpt("gpt-2t", 160, 32768, 128),
    _gpt("bloom-176b", 70, 14336, 112, 250880),
    _llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
    _llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000),
    _llama("llama2-70b", 80, 8192, 64, 8, 28672, 32000),
    _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
    _llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
    _llama("llama3-405b", 126, 16384, 128, 8, 53248, 128256),
    Model("moe", 32, 4096, 32, 8, 14336, 32000, experts=8, top_k=2, name="mixtral-8x7b"),
    Model("moe", 56, 6144, 48, 8, 16384, 32768, experts=8, top_k=2, name="mixtral-8x22b"),
    Model("moe", 48, 2048, 32, 4, 768, 151936, experts=128, top_k=8, head_dim=128, name="qwen3-30b-a3b"),
    Model("moe", 94, 4096, 64, 4, 1536, 151936, experts=128, top_k=8, head_dim=128, name="qwen3-235b-a22b"),
    Model("moe", 61, 7168, 128, 128, 2048, 129280, experts=256, top_k=8, shared_experts=1, dense_layers=3, dense_ffn=18432, name="deepseek-v3"),
    Model("bert", 12, 768, 12, vocab=30522, positions=512, name="bert-base"),
    Model("bert", 24, 1024, 16, vocab=30522, positions=512, name="bert-large"),
    Model("vit", 12, 768, 12, vocab=1000, name="vit-b"),
    Model("vit", 24, 1024, 16, vocab=1000, name="vit-l"),
)  # fmt: skip

MODELS: dict[str, Model] = {model.name: model for model in _ALL}


def named_model(name: str) -> Model:
    """A shape of the catalogue, or of a Hugging Face ``config.json`` (the file or its folder).

    Raises ``SpecError`` S139 with the nearest names.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json" and path.is_file():
        try:
            return Model.from_hf_config(json.loads(path.read_text(encoding="utf-8"))).replace(name=str(path))
        except json.JSONDecodeError as error:
            raise SpecError(
                f"{path} is no JSON: {error}",
                code="S139",
                where=str(path),
                expected="a Hugging Face config.json",
            ) from error
    near = difflib.get_close_matches(name, MODELS, n=3, cutoff=0.3)
    raise SpecError(
        f"no model shape is called {name!r}",
        code="S139",
        where="model",
        expected="one of " + ", ".join(MODELS) + ", a config.json, or a job file",
        next_step=f"perhaps you meant {', '.join(near)}" if near else "serai plan --list",
    )
