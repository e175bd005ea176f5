"""What the job file's models say about each key: for messages, ``serai explain KEY`` and the reference."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from serai.spec.document import JobSpec

__all__ = ["SpecKey", "find_key", "list_keys", "section_of", "suggest_key", "takes_text"]


@dataclass(frozen=True)
class SpecKey:
    """One key of the job file.

    Attributes:
        path: dotted, such as ``train.learning_rate``.
        kind: what it takes, in words.
        default: as YAML would write it; ``None`` when the key is required or a section.
        section: whether it holds further keys.
    """

    path: str
    kind: str
    required: bool
    default: str | None
    description: str
    section: bool
    choices: tuple[str, ...]
    annotation: Any


def list_keys() -> list[SpecKey]:
    """Every key, sections before what they hold, in the order of the models."""
    return list(_walk(JobSpec, ""))


def find_key(path: str) -> SpecKey | None:
    """A key by its dotted path; list items (``train.betas.0``) answer with the key of the list."""
    by_path = {key.path: key for key in list_keys()}
    if path in by_path:
        return by_path[path]
    parent, _, last = path.rpartition(".")
    return by_path.get(parent) if last.isdigit() else None


def section_of(path: str) -> type[BaseModel] | None:
    """The model behind a section (``""`` is the job itself), or ``None`` for anything else."""
    if not path:
        return JobSpec
    key = find_key(path)
    return model_of(key.annotation) if key is not None and key.section else None


def suggest_key(path: str) -> str | None:
    """The key that somebody who wrote an unknown path may have meant: one beside it, else one elsewhere."""
    import difflib

    parent, _, last = path.rpartition(".")
    wanted = last.replace("-", "_").lower()
    names = [key.path for key in list_keys()]
    beside = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == parent}
    near = difflib.get_close_matches(wanted, beside, n=1, cutoff=0.6)
    if near:
        return beside[near[0]]
    for name in names:
        if name.rpartition(".")[2] == wanted:
            return name
    synonym = _SYNONYMS.get(wanted)
    if synonym is not None:
        return synonym
    elsewhere = {name.rpartition(".")[2]: name for name in names}
    near = difflib.get_close_matches(wanted, elsewhere, n=1, cutoff=0.85)
    return elsewhere[near[0]] if near else None


_SYNONYMS = {
    "lr": "train.learning_rate",
    "max_lr": "train.learning_rate",
    "min_lr": "train.min_learning_rate_ratio",
    "batch_size": "train.micro_batch",
    "micro_batch_size": "train.micro_batch",
    "per_device_train_batch_size": "train.micro_batch",
    "accumulate_grad_batches": "train.grad_accumulation",
    "gradient_accumulation_steps": "train.grad_accumulation",
    "max_steps": "train.steps",
    "dtype": "train.precision",
    "bf16": "train.precision",
    "max_grad_norm": "train.clip_norm",
    "grad_clip": "train.clip_norm",
    "gradient_clip_val": "train.clip_norm",
    "warmup": "train.warmup_steps",
    "wd": "train.weight_decay",
    "hidden_size": "model.hidden",
    "d_model": "model.hidden",
    "n_layers": "model.layers",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "n_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "intermediate_size": "model.ffn",
    "context_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "block_size": "data.seq_len",
    "dataset": "data.corpus",
    "save_every": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "gpus": "resources.processes",
    "nproc_per_node": "resources.processes",
    "world_size": "resources.processes",
    "num_nodes": "resources.nodes",
    "max_restarts": "retry.max",
    "max_retries": "retry.max",
}
"""What other trainers call these keys."""


def takes_text(annotation: Any) -> bool:
    """Whether a key takes nothing but text, so that ``name: 123`` can only mean the text ``123``."""
    members = [member for member in _members(annotation) if member is not type(None)]
    return bool(members) and all(
        member is str
        or (get_origin(member) is Literal and all(isinstance(choice, str) for choice in get_args(member)))
        for member in members
    )


def takes_null(annotation: Any) -> bool:
    return type(None) in _members(annotation)


def item_of(annotation: Any) -> Any:
    """The annotation of a list's items, or ``None`` when the key takes no list."""
    for member in _members(annotation):
        if get_origin(member) in (tuple, list):
            return get_args(member)[0]
    return None


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a section's annotation, ``X | None`` included."""
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def describe_annotation(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """What a key takes, in words: ``an integer ≥ 1``, ``ddp or fsdp2``, ``a list of text``."""
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return describe_annotation(inner, (*metadata, *_constraints(extra)))
    if _is_union(annotation):
        parts = [
            describe_annotation(member, metadata)
            for member in get_args(annotation)
            if member is not type(None)
        ]
        if type(None) in get_args(annotation):
            parts.append("null")
        return " or ".join(parts)
    if get_origin(annotation) is Literal:
        choices = [str(choice) for choice in get_args(annotation)]
        return choices[0] if len(choices) == 1 else ", ".join(choices[:-1]) + " or " + choices[-1]
    if get_origin(annotation) in (tuple, list):
        arguments = get_args(annotation)
        if Ellipsis in arguments or get_origin(annotation) is list:
            return f"a list of {_plural(arguments[0])}"
        return f"a list of {len(arguments)} {_plural(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a mapping"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return " ".join([names.get(annotation, str(annotation)), _bounds(metadata)]).strip()


def yaml_text(value: Any) -> str:
    """A value as a job file would write it, on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(yaml_text(item) for item in value) + "]"
    return str(value)


def _walk(model: type[BaseModel], prefix: str) -> Iterator[SpecKey]:
    for name, info in model.model_fields.items():
        inner = model_of(info.annotation)
        yield SpecKey(
            path=prefix + name,
            kind="a mapping" if inner else _describe_field(info),
            required=info.is_required(),
            default=None
            if inner or info.is_required()
            else yaml_text(info.get_default(call_default_factory=True)),
            description=info.description or "",
            section=inner is not None,
            choices=_choices(info.annotation),
            annotation=info.annotation,
        )
        if inner is not None:
            yield from _walk(inner, f"{prefix}{name}.")


def _describe_field(info: FieldInfo) -> str:
    return describe_annotation(info.annotation, tuple(info.metadata))


def _choices(annotation: Any) -> tuple[str, ...]:
    return tuple(
        str(choice)
        for member in _members(annotation)
        if get_origin(member) is Literal
        for choice in get_args(member)
    )


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _members(annotation: Any) -> list[Any]:
    """The branches of a union, without their ``Annotated`` wrapping."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if _is_union(annotation):
        return [inner for member in get_args(annotation) for inner in _members(member)]
    return [annotation]


def _constraints(extra: list[Any]) -> list[Any]:
    return [part for entry in extra for part in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]


def _bounds(metadata: tuple[Any, ...]) -> str:
    shown = []
    for constraint in metadata:
        for kind, sign, attribute in ((Gt, ">", "gt"), (Ge, "≥", "ge"), (Lt, "<", "lt"), (Le, "≤", "le")):
            if isinstance(constraint, kind):
                shown.append(f"{sign} {yaml_text(getattr(constraint, attribute))}")
    return " and ".join(shown)


def _plural(annotation: Any) -> str:
    return {str: "text", int: "integers", float: "numbers"}.get(annotation, describe_annotation(annotation))
