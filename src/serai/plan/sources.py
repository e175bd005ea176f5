"""A model's shape from a Hugging Face config or from a module on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from serai.errors import SpecError
from serai.plan.model import Model

__all__ = ["model_from_hf", "model_from_module"]

_BERT = {"bert", "roberta", "electra", "xlm-roberta", "deberta", "deberta-v2", "modernbert", "camembert"}
_PLAIN = {"gpt2", "gpt_neox", "gpt_neo", "gptj", "opt", "bloom", "mpt", "falcon", "gpt_bigcode", "phi", "starcoder2", "nemotron", "codegen"}  # fmt: skip
_ALIBI = {"bloom", "mpt"}


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _as_dict(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        return config.to_dict()  # type: ignore[no-any-return]
    raise SpecError(
        f"a model cannot be read from a {type(config).__name__}",
        code="S134",
        where="model",
        expected="a mapping such as a parsed config.json, or an object with to_dict()",
    )


def model_from_hf(config: Any) -> Model:
    """Any decoder, BERT- or ViT-like config. Raises ``SpecError`` S134 naming the keys it looked for."""
    values = _as_dict(config)
    for nested in ("text_config", "llm_config", "language_config"):
        if isinstance(values.get(nested), Mapping):
            values = values[nested]
    kind = str(values.get("model_type", "")).lower()
    hidden = _first(values, "hidden_size", "n_embd", "d_model", "dim")
    layers = _first(values, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    heads = _first(values, "num_attention_heads", "n_head", "num_heads", "n_heads")
    if not (hidden and layers and heads):
        raise SpecError(
            "the config names no transformer shape",
            code="S134",
            where="model",
            expected="hidden_size (n_embd, d_model), num_hidden_layers (n_layer) and num_attention_heads (n_head)",
        )
    vit = kind in ("vit", "deit", "dinov2") or ("patch_size" in values and "vocab_size" not in values)
    experts = _first(values, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") or 0
    top_k = _first(values, "num_experts_per_tok", "moe_topk", "moe_top_k") or (1 if experts else 0)
    arch = (
        "vit"
        if vit
        else "bert"
        if kind in _BERT
        else "gpt"
        if kind in _PLAIN
        else "moe"
        if experts > 1
        else "llama"
    )
    if kind == "falcon" and not values.get("multi_query"):
        kv_default = heads
    else:
        kv_default = 1 if kind == "falcon" or values.get("multi_query") else heads
    kv_heads = _first(values, "num_key_value_heads", "num_kv_heads", "n_head_kv") or kv_default
    ffn = _first(values, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    dense_ffn = None
    if arch == "moe":
        dense_ffn, ffn = ffn, _first(values, "moe_intermediate_size", "expert_intermediate_size") or ffn
    if ffn is None:
        ratio = values.get("expansion_ratio") or values.get("mlp_ratio") or 4
        ffn = int(ratio * hidden)
    labels = values.get("num_labels") or len(values.get("id2label") or {}) or 1000
    return Model(
        arch,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=labels if vit else _first(values, "vocab_size") or 50257,
        experts=experts if arch == "moe" else 0,
        top_k=top_k if arch == "moe" else 0,
        shared_experts=int(_first(values, "n_shared_experts", "num_shared_experts") or 0)
        if arch == "moe"
        else 0,
        dense_layers=int(values.get("first_k_dense_replace") or 0) if arch == "moe" else 0,
        dense_ffn=dense_ffn,
        head_dim=values.get("head_dim") if not values.get("kv_lora_rank") else None,
        core_width=(
            heads
            * (
                (values.get("qk_nope_head_dim") or 128)
                + (values.get("qk_rope_head_dim") or 64)
                + (values.get("v_head_dim") or 128)
            )
            // 2
            if values.get("kv_lora_rank")
            else None
        ),
        tied=values.get("tie_word_embeddings", None if arch != "llama" else False),
        positions=1 if kind in _ALIBI else _first(values, "max_position_embeddings", "n_positions") or 2048,
        name=str(values.get("_name_or_path") or values.get("name") or kind),
    )


def model_from_module(module: Any, *, seq_len: int = 2048) -> Model:
    """Shape of any ``nn.Module``: its ``config`` if it has a Hugging Face one, else read off its layers.

    Layers are the longest ``ModuleList``; hidden is the width most products share; the MLP width the widest
    product of a layer; the vocabulary the largest embedding. Parameters are counted, tied ones once.
    """
    import torch

    counted = sum(parameter.numel() for parameter in module.parameters())
    config = getattr(module, "config", None)
    if config is not None and (isinstance(config, Mapping) or hasattr(config, "to_dict")):
        return model_from_hf(config).replace(params_exact=counted)

    modules = list(module.named_modules())
    blocks = max(
        (len(child) for _, child in modules if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential))),
        default=1,
    )
    linears = [child for _, child in modules if isinstance(child, torch.nn.Linear)]
    embeddings = [child for _, child in modules if isinstance(child, torch.nn.Embedding)]
    if not linears:
        raise SpecError(
            "the module has no Linear layer to read a shape from",
            code="S134",
            where="model",
            expected="a transformer, or Model(arch, layers, hidden, heads, …) by hand",
        )
    vocabulary = max((child.num_embeddings for child in embeddings), default=1000)
    widths = Counter(child.in_features for child in linears)
    hidden = (
        max(embeddings, key=lambda e: e.num_embeddings).embedding_dim
        if embeddings
        else widths.most_common(1)[0][0]
    )
    inside = [child for child in linears if vocabulary not in (child.out_features, child.in_features)]
    ffn = max((child.in_features for child in inside if child.in_features > hidden), default=4 * hidden)
    gated = sum(1 for child in inside if child.out_features == ffn) > sum(
        1 for child in inside if child.in_features == ffn
    )
    heads = next(
        (
            int(value)
            for _, child in modules
            for name in ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads")
            if isinstance(value := getattr(child, name, None), int)
        ),
        max(1, hidden // 64),
    )
    kv_heads = next(
        (
            int(value)
            for _, child in modules
            for name in ("num_key_value_heads", "n_kv_heads", "kv_heads", "num_kv_heads")
            if isinstance(value := getattr(child, name, None), int)
        ),
        heads,
    )
    return Model(
        "llama" if gated else "gpt" if embeddings else "vit",
        layers=blocks,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocabulary,
        positions=seq_len,
        params_exact=counted,
        name=type(module).__name__,
    )
