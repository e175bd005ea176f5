"""A foreign tree of tensors and plain values as serai keeps one: modules, optimizers, values, tied weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from serai.checkpoint.format import DTYPES
from serai.checkpoint.importing import Incoming, Source
from serai.checkpoint.names import UniqueNames
from serai.checkpoint.values import Node, TensorRef, encode
from serai.errors import CheckpointError

__all__ = ["Late", "Translator", "bytes_of"]

Path_ = tuple[str | int, ...]

# What common layers keep beside parameters. Only used to tell whether counts agree; shapes must agree too.
_BUFFERS = {
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "inv_freq",
    "position_ids",
    "token_type_ids",
}


class Late:
    """A tensor that is read when its bytes are wanted."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], read: Callable[[], torch.Tensor]) -> None:
        self.dtype = dtype
        self.shape = shape
        self.read = read


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes, C-ordered, in one part; only what does not lie so already is copied."""
    if tensor.numel():
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        yield flat.numpy().data


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | Late)


def _is_module(value: Any) -> bool:
    """A state dict: names to tensors, and nothing nested but extra state."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) for key in value)
        and all(_is_tensor(item) or key.endswith("_extra_state") for key, item in value.items())
        and any(_is_tensor(item) for item in value.values())
    )


def _is_optimizer(value: Any) -> bool:
    groups = value.get("param_groups") if isinstance(value, Mapping) else None
    return (
        isinstance(groups, list)
        and bool(groups)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
        and isinstance(value.get("state", {}), Mapping)
        and set(value) <= {"state", "param_groups"}
    )


class Translator:
    """Walks a foreign state once. Raises ``CheckpointError`` S434 and S439, ``UnsafeObject`` for odd values."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._source = Source()
        self._names = UniqueNames()
        self._known: dict[tuple[Any, ...], str] = {}
        self._modules: dict[Path_, Mapping[str, Any]] = {}

    def translate(self, state: Mapping[str, Any]) -> Source:
        self._modules = dict(_find_modules(state, ()))
        for name, value in state.items():
            self._source.trees[name] = encode(self._walk(value, (name,)), name)
        return self._source

    def _walk(self, value: Any, path: Path_) -> Any:
        if _is_tensor(value):
            return TensorRef(self._add(value, path))
        if _is_module(value):
            return self._module(value, path)
        if _is_optimizer(value):
            return self._optimizer(value, path)
        if isinstance(value, Mapping):
            return {key: self._walk(item, (*path, _step(key))) for key, item in value.items()}
        if isinstance(value, list):
            return [self._walk(item, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            return tuple(self._walk(item, (*path, i)) for i, item in enumerate(value))
        return value

    def _module(self, value: Mapping[str, Any], path: Path_) -> Node:
        aliases: dict[str, str] = {}
        extra: dict[str, Any] = {}
        for key, item in value.items():
            if not _is_tensor(item):
                extra[key] = encode(self._walk(item, (*path, key)), _dotted((*path, key)))
                continue
            before = len(self._source.tensors)
            name = self._add(item, (*path, key))
            if len(self._source.tensors) == before:
                aliases[key] = name
        body: dict[str, Any] = {"path": list(path)}
        if extra:
            body["extra"] = extra
        if aliases:
            body["aliases"] = aliases
        return Node("$module", body)

    def _optimizer(self, value: Mapping[str, Any], path: Path_) -> Node:
        groups = value["param_groups"]
        names = self._parameters(value, path)
        state = value.get("state", {})
        stored: dict[str, Any] = {}
        for group, members in zip(groups, names, strict=True):
            for key, name in zip(group["params"], members, strict=True):
                for part, item in state.get(key, {}).items():
                    below = (*path, "state", name, str(part))
                    if _is_tensor(item):
                        self._add(item, below, alias=False)
                    else:
                        stored.setdefault(name, {})[part] = encode(self._walk(item, below), _dotted(below))
        plain = [
            {
                **{
                    str(key): encode(self._walk(item, (*path, "param_groups", g, str(key))), _dotted(path))
                    for key, item in group.items()
                    if key not in ("params", "param_names")
                },
                "params": members,
            }
            for g, (group, members) in enumerate(zip(groups, names, strict=True))
        ]
        body: dict[str, Any] = {"path": list(path), "param_groups": plain}
        if stored:
            body["values"] = stored
        return Node("$optimizer", body)

    def _parameters(self, value: Mapping[str, Any], path: Path_) -> list[list[str]]:
        """The name of every parameter, group by group, as a live optimizer's would be called."""
        names = []
        for group in value["param_groups"]:
            given = group.get("param_names") or group["params"]
            if not all(isinstance(name, str) for name in given) or len(given) != len(group["params"]):
                return self._by_order(value, path)
            names.append([self._qualified(name) for name in given])
        return names

    def _qualified(self, name: str) -> str:
        """With several modules in a state, a parameter's name starts with its module's."""
        if len(self._modules) < 2:
            return name
        owners = [path for path, module in self._modules.items() if name in module]
        return f"{_dotted(owners[0])}.{name}" if len(owners) == 1 else name

    def _by_order(self, value: Mapping[str, Any], path: Path_) -> list[list[str]]:
        """Numbers as names: taken by the order of the one model, if count and every shape agree."""
        groups = value["param_groups"]
        if len(self._modules) != 1 or len(groups) != 1:
            raise self._unnamed(path, f"{len(groups)} groups and {len(self._modules)} models")
        module = next(iter(self._modules.values()))
        numbers = groups[0]["params"]
        chosen = _own_floats(module)
        if len(chosen) != len(numbers):
            chosen = {key: item for key, item in chosen.items() if key.rpartition(".")[2] not in _BUFFERS}
        if len(chosen) != len(numbers):
            raise self._unnamed(path, f"{len(numbers)} numbers and {len(chosen)} parameters")
        for number, (name, parameter) in zip(numbers, chosen.items(), strict=True):
            for part, item in value.get("state", {}).get(number, {}).items():
                if _is_tensor(item) and tuple(item.shape) not in ((), (1,), tuple(parameter.shape)):
                    raise self._unnamed(
                        path,
                        f"{part} of number {number} has another shape than {name}, which comes at its place",
                    )
        self._source.notes.append(
            f"{_dotted(path)} numbers its parameters; they were named by the model's order, and all shapes agree"
        )
        return [list(chosen)]

    def _unnamed(self, path: Path_, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{_dotted(path)} numbers its parameters, and which number is which cannot be told: {reason}",
            code="S439",
            where=self._where,
            expected="names (param_names in its groups, or get_state_dict), or one model and one group in one order",
            next_step="import without it (--keys model), or save it with names: "
            "AdamW(model.named_parameters(), …)",
        )

    def _add(self, value: Any, path: Path_, *, alias: bool = True) -> str:
        where = _dotted(path)
        dtype = DTYPES.get(str(value.dtype).removeprefix("torch."))
        real = isinstance(value, torch.Tensor)
        if dtype is None or (
            real and (value.layout is not torch.strided or value.is_quantized or value.is_meta)
        ):
            raise CheckpointError(
                f"{where} is a tensor of a kind that is not imported ({value.dtype})",
                code="S434",
                where=self._where,
                expected="dense tensors of one of " + ", ".join(sorted(DTYPES)),
            )
        if real and alias and value.numel():
            memory = (value.data_ptr(), tuple(value.shape), value.stride(), dtype.name)
            if memory in self._known:
                return self._known[memory]
        name = self._names.take(where)
        if real and alias and value.numel():
            self._known[memory] = name
        self._source.tensors.append(Incoming(name, path, dtype, tuple(value.shape), _parts(value)))
        return name


def _parts(value: Any) -> Callable[[], Iterator[memoryview]]:
    return lambda: bytes_of(value.read() if isinstance(value, Late) else value)


def _own_floats(module: Mapping[str, Any]) -> dict[str, Any]:
    """Floating point tensors of a state dict, tied ones once."""
    seen: set[tuple[Any, ...]] = set()
    found = {}
    for key, item in module.items():
        if not _is_tensor(item) or not (item.dtype.is_floating_point or item.dtype.is_complex):
            continue
        if isinstance(item, torch.Tensor) and item.numel():
            memory = (item.data_ptr(), tuple(item.shape))
            if memory in seen:
                continue
            seen.add(memory)
        found[key] = item
    return found


def _find_modules(value: Any, path: Path_) -> Iterator[tuple[Path_, Mapping[str, Any]]]:
    if _is_module(value):
        yield path, value
    elif isinstance(value, Mapping) and not _is_optimizer(value):
        for key, item in value.items():
            yield from _find_modules(item, (*path, _step(key)))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _find_modules(item, (*path, i))


def _step(key: Any) -> str | int:
    return key if isinstance(key, int) and not isinstance(key, bool) else str(key)


def _dotted(path: Path_) -> str:
    return ".".join(str(key) for key in path)
