"""The model: Hugging Face's Llama from a config, with weights that depend on the seed alone."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

from serai.errors import EnvironmentFault
from serai.train.config import ModelConfig

if TYPE_CHECKING:
    from transformers import LlamaConfig

__all__ = ["build_model", "count_parameters", "llama_config", "materialise", "sum_of_losses"]

INITIAL_STD = 0.02


def llama_config(config: ModelConfig, *, vocab_size: int, seq_len: int, end_of_text: int) -> LlamaConfig:
    """The Hugging Face config of a model."""
    try:
        from transformers import LlamaConfig
    except ImportError as error:
        raise EnvironmentFault(
            "the `transformers` package is not installed",
            code="S232",
            expected="the `transformers` extra, which native training jobs need",
            next_step="pip install 'serai[transformers]'",
        ) from error
    shape = config.shape()
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tie_embeddings,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        initializer_range=INITIAL_STD,
        use_cache=False,
        dtype="float32",
    )


def build_model(config: LlamaConfig) -> nn.Module:
    """The model on the meta device: shapes and names, no memory. ``materialise`` gives it weights."""
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def materialise(model: nn.Module, *, device: torch.device, seed: int) -> None:
    """Allocate a meta model on ``device`` and fill its weights, whether they are sharded or not.

    Each parameter is drawn on the CPU by a generator of its own, seeded by ``seed`` and the parameter's
    name, and a rank keeps its part: the same numbers for every layout, world size and device.
    """
    tied = _tied(model)
    model.to_empty(device=device)
    for name, owner in tied.items():
        _set(model, name, model.get_parameter(owner))
    _fill_rotary_buffers(model, device)
    layers = int(getattr(model.config, "num_hidden_layers", 1))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(parameter, _initial(name, tuple(parameter.shape), seed=seed, layers=layers))


def _initial(name: str, shape: tuple[int, ...], *, seed: int, layers: int) -> torch.Tensor:
    """First value of a parameter: ones for norms, else normal with a deviation of 0.02.

    The two projections that write into the residual stream are narrower by ``sqrt(2 · layers)``, so that
    the stream's variance does not grow with depth (Radford et al., 2019).
    """
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = INITIAL_STD / math.sqrt(2 * layers) if writes_residual else INITIAL_STD
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _fill(parameter: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        # No broadcast: every rank has drawn the same whole tensor and cuts its own part out of it.
        mesh, placements = parameter.device_mesh, parameter.placements
        value = value.to(parameter.device)
        parameter.copy_(distribute_tensor(value, mesh, placements, src_data_rank=None))
    else:
        parameter.copy_(value)


def _tied(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are another one's memory → that one's name."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    return tied


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module), attribute, parameter)


def _fill_rotary_buffers(model: nn.Module, device: torch.device) -> None:
    """Compute the buffers that the constructor computes, which the meta device has swallowed."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    filled = set()
    for name, module in model.named_modules():
        if isinstance(module, LlamaRotaryEmbedding):
            for buffer, value in LlamaRotaryEmbedding(module.config).named_buffers():
                module.get_buffer(buffer).copy_(value.to(device))
                filled.add(f"{name}.{buffer}")
    unknown = {name for name, _ in model.named_buffers()} - filled
    if unknown:
        raise RuntimeError(f"no rule fills the buffers {sorted(unknown)} of {type(model).__name__}")


def count_parameters(model: nn.Module) -> int:
    """Parameters of the whole model, sharded or not; a tied one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def sum_of_losses(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the negative log-likelihoods (nats) of all labels that are not ``-100``, in fp32.

    Args:
        inputs: ``[rows, seq_len] int64``.
        labels: ``[rows, seq_len] int64``, already shifted: ``labels[i, t]`` follows ``inputs[i, t]``.
    """
    output: Any = model(input_ids=inputs, use_cache=False)
    logits = output.logits.flatten(0, 1).float()
    return functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
