"""Sources that need torch: ``torch.save`` files, DCP folders, DeepSpeed universal folders."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from serai.checkpoint.dcp import DcpFolder
from serai.checkpoint.foreign import Late, Translator
from serai.checkpoint.importing import Source, unknown_keys
from serai.errors import CheckpointCorrupt, CheckpointError, UnsafeObject

__all__ = ["open_dcp", "open_deepspeed", "open_torch"]


def open_torch(path: Path, name: str, rename: dict[str, str], keys: set[str] | None) -> Source:
    """A file of ``torch.save``, loaded with ``weights_only=True`` and mapped, not read, where it can be."""
    value = _load(path)
    if isinstance(value, torch.Tensor) or not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a {type(value).__name__}",
            code="S436",
            where=str(path),
            expected="a state dict, or a dict of them",
        )
    return _translate(path, value, name, rename, keys)


def open_dcp(path: Path, name: str, rename: dict[str, str], keys: set[str] | None) -> Source:
    """A DCP folder; each tensor is read when it is written, so one at a time is in memory."""
    folder = DcpFolder(path)
    others = [p for p in folder.paths if folder.description(p) is None]
    chosen = [p for p in others if keys is None or rename.get(str(p[0]), str(p[0])) in keys]
    tree: dict[Any, Any] = {}
    for p, value in folder.read(chosen).items():
        _place(tree, p, value)
    for p in folder.paths:
        if (described := folder.description(p)) is not None:
            _place(tree, p, Late(described[0], described[1], _late(folder, p)))
    return _translate(path, _lists(tree), name, rename, keys)


def open_deepspeed(path: Path, name: str, rename: dict[str, str], keys: set[str] | None) -> Source:
    """A DeepSpeed universal folder: fp32 weights as the model, the moments as its optimizer.

    Hyperparameters are not taken: a restore leaves those of the live optimizer.
    """
    weights: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    for folder in sorted(p for p in (path / "zero").iterdir() if p.is_dir()):
        parts = {file.stem: _parameter(file) for file in sorted(folder.glob("*.pt"))}
        weight = parts.pop("fp32", None)
        if not isinstance(weight, torch.Tensor):
            raise CheckpointCorrupt(
                f"{folder.name} has no weights", code="S436", where=str(folder / "fp32.pt")
            )
        weights[folder.name] = weight
        for key, value in parts.items():
            if key == "step" and not isinstance(value, torch.Tensor):
                value = torch.tensor(float(value))
            state.setdefault(folder.name, {})[key] = value
    notes = [
        "weights are DeepSpeed's fp32 master copies; hyperparameters stay those of the live optimizer",
    ]
    buffers = _buffers(path, weights, notes)
    tree: dict[str, Any] = {name: {**weights, **buffers}}
    if state:
        tree["optimizer"] = {"state": state, "param_groups": [{"params": list(weights)}]}
    source = _translate(path, tree, name, rename, keys)
    source.notes[:0] = notes
    return source


def _parameter(file: Path) -> Any:
    """What one file of a universal folder holds: ``{"param": tensor, …}``, a tensor or a number."""
    value = _load(file)
    if isinstance(value, dict) and "param" in value:
        return value["param"]
    if isinstance(value, torch.Tensor | int | float):
        return value
    raise CheckpointCorrupt(f"{file} holds no parameter", code="S436", where=str(file))


def _buffers(path: Path, weights: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Buffers are in the first model file only, beside objects that may need pickle."""
    files = [p for p in sorted(path.glob("mp_rank_*_model_states.pt")) if re.match(r"mp_rank_0+_", p.name)]
    if not files:
        return {}
    try:
        module = _load(files[0]).get("module") or {}
    except (UnsafeObject, AttributeError):
        notes.append(
            f"{files[0].name} holds objects that only pickle can carry: buffers are not imported, and a strict "
            "restore names those that are missing"
        )
        return {}
    return {k: v for k, v in module.items() if isinstance(v, torch.Tensor) and k not in weights and v.numel()}


def _load(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says what it thinks of odd pickles, then refuses them
            try:
                return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                return torch.load(path, map_location="cpu", weights_only=True)  # the old, unzipped format
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            raise _unreadable(path, error) from error
        raise UnsafeObject(
            f"{path} holds a {found[1]}, which only pickle can carry",
            code="S437",
            where=str(path),
            expected="tensors and plain values, as torch.load(weights_only=True) takes them",
            next_step="load it where you trust it, and torch.save only its state dicts",
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: BaseException) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{path} cannot be read: {(str(error) or type(error).__name__).splitlines()[0]}",
        code="S436",
        where=str(path),
        expected="a file that torch.save wrote",
    )


def _late(folder: DcpFolder, path: tuple[str | int, ...]) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        tensor: torch.Tensor = folder.read([path])[path]
        return tensor

    return read


def _place(tree: dict[Any, Any], path: tuple[str | int, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _lists(tree: Any) -> Any:
    """DCP's paths have numbers where lists were."""
    if not isinstance(tree, dict):
        return tree
    made = {key: _lists(item) for key, item in tree.items()}
    if made and all(isinstance(key, int) for key in made) and sorted(made) == list(range(len(made))):
        return [made[i] for i in range(len(made))]
    return made


def _translate(
    path: Path, value: dict[Any, Any], name: str, rename: dict[str, str], keys: set[str] | None
) -> Source:
    if _is_bare(value):
        value = {name: value}
    named = {rename.get(str(key), str(key)): item for key, item in value.items()}
    if keys is not None:
        if missing := keys - named.keys():
            raise unknown_keys(path, missing, named)
        named = {key: item for key, item in named.items() if key in keys}
    return Translator(str(path)).translate(named)


def _is_bare(value: dict[Any, Any]) -> bool:
    """Whether a dict is one state dict itself, rather than a dict of them."""
    tensors = [item for item in value.values() if isinstance(item, torch.Tensor | Late)]
    others = [item for item in value.values() if isinstance(item, dict | list)]
    return bool(tensors) and not others and any("." in str(key) or key in ("weight", "bias") for key in value)
