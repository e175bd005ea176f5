"""From live objects to tensors with stable names and a tree of plain values.

``flatten`` walks the user's ``state``. Modules give their parameters and buffers under fully qualified
names without wrapper prefixes; optimizers give their state under the names of the parameters it belongs
to, so that it survives another order, another sharding, another world size. Anything else with
``state_dict`` is opaque: its tree is stored as it is. Nothing is copied here and no address is kept
beyond one save.
"""

from __future__ import annotations

import enum
import functools
import gc
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate

from serai.checkpoint.format import DTYPES, DType
from serai.checkpoint.hashing import digest
from serai.checkpoint.layout import Box
from serai.checkpoint.names import UniqueNames
from serai.checkpoint.values import Node, TensorRef, encode
from serai.errors import StateMismatch, UnsafeObject

__all__ = [
    "RNG",
    "Flat",
    "Kind",
    "Leaf",
    "Path",
    "Stateful",
    "dtensor_box",
    "flatten",
    "parameter_names",
    "unwrap",
]

Path = tuple[str | int, ...]

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@runtime_checkable
class Stateful(Protocol):
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Kind(enum.Enum):
    """How ranks stand to each other in a tensor."""

    SHARDED = "sharded"  # a DTensor: the mesh says who holds what
    REPLICATED = "replicated"  # a plain parameter or optimizer tensor: equal wherever the name exists
    BUFFER = "buffer"  # a module's buffer: the lowest rank's is the true one, as in DDP
    LOCAL = "local"  # anything else: every rank keeps its own


@dataclass(slots=True)  # not frozen: thousands are made at every save
class Leaf:
    """One tensor of this rank.

    ``tensor`` is the local part; ``box`` is where it lies in the global ``shape``. ``holders`` are the
    global ranks with the same box (DTensors only; otherwise found when ranks compare their plans).
    """

    name: str
    path: Path
    tensor: torch.Tensor
    dtype: DType
    shape: tuple[int, ...]
    box: Box
    kind: Kind
    holders: tuple[int, ...] | None = None
    detail: dict[str, Any] | None = None
    frozen: bool = False

    @property
    def nbytes(self) -> int:
        return self.box.count * self.dtype.itemsize


@dataclass
class Flat:
    """A flattened state: its tensors, and per top-level name the tree of everything else (as JSON)."""

    leaves: list[Leaf] = field(default_factory=list)
    trees: dict[str, Any] = field(default_factory=dict)


class RNG:
    """The random number generators of this process: Python, numpy, torch, and CUDA's where it is in use."""

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": [version, np.array(words, dtype=np.uint64), gauss],
            "numpy": [kind, np.asarray(keys), int(position), int(has_gauss), float(cached)],
            "torch": bytes(torch.get_rng_state().numpy()),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = bytes(torch.cuda.get_rng_state().numpy())
        return state

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(int(word) for word in words), gauss))
        np.random.set_state(tuple(state["numpy"]))
        torch.set_rng_state(_bytes_tensor(state["torch"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(_bytes_tensor(state["cuda"]))

    def fork(self, rank: int) -> None:
        """Give a rank that did not exist at the save a stream of its own, derived from the loaded one."""
        seed = int.from_bytes(
            digest(bytes(torch.get_rng_state().numpy()) + rank.to_bytes(8, "little"))[:4], "little"
        )
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside DDP, DataParallel and ``torch.compile``."""
    while True:
        inner = None
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = module.module
        elif type(module).__name__ == "OptimizedModule":
            inner = module._modules.get("_orig_mod")
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def clean_name(key: str) -> str:
    """A state-dict key without what ``torch.compile``, activation checkpointing and FSDP put into it."""
    for wrapper in _WRAPPERS:
        if wrapper in key:
            key = key.replace(wrapper, "")
    return key


def module_items(module: nn.Module) -> dict[str, Any]:
    """A module's own state dict under clean names, with the live Parameters and buffers as values.

    FSDP2 leaves its root group gathered after a forward pass without a backward one; what is sharded is
    made so again first, or its parameters would look like plain tensors without their names.
    """
    _reshard(module)
    return {clean_name(key): value for key, value in unwrap(module).state_dict(keep_vars=True).items()}


def _reshard(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def parameter_names(state: Any) -> dict[int, str]:
    """``id(parameter)`` → name, for every parameter of every module anywhere in ``state``.

    With several modules the top-level key goes before the name, so that two models never collide.
    """
    modules = list(_modules(state, ()))
    for _, module in modules:
        _reshard(module)
    names: dict[int, str] = {}
    for path, module in modules:
        prefix = ".".join(str(key) for key in path) + "." if len(modules) > 1 else ""
        for name, parameter in unwrap(module).named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), prefix + clean_name(name))
    return names


def _modules(value: Any, path: Path) -> Iterator[tuple[Path, nn.Module]]:
    if isinstance(value, nn.Module):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _modules(item, (*path, key if isinstance(key, int) else str(key)))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _modules(item, (*path, i))


def optimizer_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The name of every parameter, group by group; ``group0.3`` for one that no module in the state owns."""
    return [
        [names.get(id(parameter)) or f"group{g}.{i}" for i, parameter in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def flatten(state: Mapping[str, Any]) -> Flat:
    """Walk a state. Raises ``UnsafeObject`` for what cannot be stored, naming the place and the type."""
    if not isinstance(state, Mapping):
        raise StateMismatch(
            f"state is a {type(state).__name__}",
            expected="a dict that maps names to objects with state_dict, tensors or plain values",
            next_step='ckpt.save(step, {"model": model, "optimizer": optimizer})',
        )
    # Thousands of small objects are made and none of them is garbage: collecting on the way costs more
    # than the walk.
    collecting = gc.isenabled()
    gc.disable()
    try:
        walker = _Walker(parameter_names(state))
        for key, value in state.items():
            if not isinstance(key, str):
                raise StateMismatch(f"state has the key {key!r}", expected="strings as top-level names")
            walker.flat.trees[key] = encode(walker.walk(value, (key,)), key)
    finally:
        if collecting:
            gc.enable()
    return walker.flat


class _Walker:
    def __init__(self, names: Mapping[int, str]) -> None:
        self.flat = Flat()
        self._parameter_names = names
        self._names = UniqueNames()
        self._aliases: dict[tuple[Any, ...], str] = {}

    def walk(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return TensorRef(self.add(value, path, Kind.LOCAL))
        if value is None or isinstance(value, str | bytes | int | float | complex | np.ndarray | np.generic):
            return value
        if isinstance(value, nn.Module):
            return self._module(value, path)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value, path)
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, list):
            return [self.walk(item, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            return tuple(self.walk(item, (*path, i)) for i, item in enumerate(value))
        if isinstance(value, Stateful) and not isinstance(value, type):
            return self.walk(value.state_dict(), path)
        return value

    def _mapping(self, value: Mapping[Any, Any], path: Path) -> Any:
        walked = {}
        for key, item in value.items():
            below = (*path, key if isinstance(key, int) and not isinstance(key, bool) else str(key))
            walked[key] = self.walk(item, below)
        return OrderedDict(walked) if isinstance(value, OrderedDict) else walked

    def _module(self, module: nn.Module, path: Path) -> Node:
        extra: dict[str, Any] = {}
        aliases: dict[str, str] = {}
        for key, value in module_items(module).items():
            below = (*path, key)
            if isinstance(value, torch.Tensor):
                kind = Kind.REPLICATED if isinstance(value, nn.Parameter) else Kind.BUFFER
                before = len(self.flat.leaves)
                frozen = isinstance(value, nn.Parameter) and not value.requires_grad
                name = self.add(value, below, kind, frozen=frozen)
                if len(self.flat.leaves) == before:
                    aliases[key] = name
            else:
                extra[key] = encode(self.walk(value, below), _dotted(below))
        body: dict[str, Any] = {"path": list(path)}
        if extra:
            body["extra"] = extra
        if aliases:
            body["aliases"] = aliases
        return Node("$module", body)

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: Path) -> Node:
        state = optimizer.state_dict()
        groups = optimizer_names(optimizer, self._parameter_names)
        flat_names = [name for group in groups for name in group]
        stored: dict[str, Any] = {}
        indices = [index for group in state["param_groups"] for index in group["params"]]
        for index, name in zip(indices, flat_names, strict=True):
            for key, value in state["state"].get(index, {}).items():
                below = (*path, "state", name, key)
                if isinstance(value, torch.Tensor):
                    self.add(value, below, Kind.REPLICATED, alias=False)
                else:
                    stored.setdefault(name, {})[key] = encode(self.walk(value, below), _dotted(below))
        plain = [
            {
                key: encode(
                    self.walk(value, (*path, "param_groups", g, key)),
                    _dotted((*path, "param_groups", g, key)),
                )
                for key, value in group.items()
                if key != "params"
            }
            for g, group in enumerate(state["param_groups"])
        ]
        for group, names in zip(plain, groups, strict=True):
            group["params"] = names
        body = {"path": list(path), "param_groups": plain}
        if stored:
            body["values"] = stored
        return Node("$optimizer", body)

    def add(
        self, tensor: torch.Tensor, path: Path, kind: Kind, *, alias: bool = True, frozen: bool = False
    ) -> str:
        """Record a tensor and return its name; a second path to the same memory returns the first's."""
        where = _dotted(path)
        shape = tuple(tensor.shape)
        holders: tuple[int, ...] | None = None
        box = None
        if isinstance(tensor, DTensor):
            kind = Kind.SHARDED
            box, holders = dtensor_box(tensor, where)
            tensor = tensor.to_local()
        tensor = tensor.detach()
        detail = None
        if tensor.is_quantized:
            tensor, detail = _dequantised(tensor)
        dtype = _stored_dtype(tensor.dtype)
        if tensor.layout is not torch.strided or tensor.is_meta or dtype is None:
            raise UnsafeObject(
                f"{where} is a {tensor.layout} {tensor.dtype} tensor on {tensor.device.type}",
                where=where,
                expected="a dense tensor with data, of one of " + ", ".join(sorted(DTYPES)),
                next_step="store its parts, or give the object that owns it a state_dict",
            )
        if box is None:
            box = Box.whole(shape)
        if alias and tensor.numel():
            key = (tensor.data_ptr(), shape, tensor.stride(), dtype, tensor.device, kind)
            known = self._aliases.get(key)
            if known is not None:
                return known
            name = self._aliases[key] = self._names.take(where)
        else:
            name = self._names.take(where)
        self.flat.leaves.append(Leaf(name, path, tensor, dtype, shape, box, kind, holders, detail, frozen))
        return name


def _dotted(path: Path) -> str:
    try:
        return ".".join(path)  # type: ignore[arg-type]
    except TypeError:  # a number among the keys
        return ".".join(str(key) for key in path)


@functools.cache
def _stored_dtype(dtype: torch.dtype) -> DType | None:
    return DTYPES.get(str(dtype).removeprefix("torch."))


def _dequantised(tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """The integers of a quantised tensor and the parameters that give them meaning."""
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        detail: dict[str, Any] = {
            "scheme": "per_tensor",
            "scale": float(tensor.q_scale()).hex(),
            "zero_point": tensor.q_zero_point(),
        }
    else:
        detail = {
            "scheme": "per_channel",
            "axis": tensor.q_per_channel_axis(),
            "scales": [float(s).hex() for s in tensor.q_per_channel_scales()],
            "zero_points": [float(z).hex() for z in tensor.q_per_channel_zero_points()],
        }
    detail["dtype"] = str(tensor.dtype).removeprefix("torch.")
    return tensor.int_repr(), detail


def dtensor_box(tensor: DTensor, where: str) -> tuple[Box, tuple[int, ...]]:
    """Where this rank's part of a DTensor lies, and the global ranks that hold the same part."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = tensor.device_mesh
    placements = tensor.placements
    if any(isinstance(placement, Partial) for placement in placements):
        raise StateMismatch(
            f"{where} is a DTensor with pending reductions ({placements})",
            where=where,
            expected="Shard or Replicate placements",
            next_step="redistribute it before the save",
        )
    lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    coordinate = mesh.get_coordinate()
    box = Box(tuple(int(n) for n in offsets), tuple(int(n) for n in lengths))
    if coordinate is None:
        return Box(box.offsets, (0,) * len(box.offsets)), ()
    index = tuple(
        slice(None) if isinstance(placement, Replicate) else coordinate[d]
        for d, placement in enumerate(placements)
    )
    ranks = mesh.mesh[index].flatten().tolist()
    return box, tuple(sorted(int(rank) for rank in ranks))


def python_version() -> str:
    return sys.version.split()[0]
