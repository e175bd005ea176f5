"""Matching a stored generation with the live state: what to read where, and what to set afterwards.

Binding changes nothing. ``Binding.copies`` are the bytes to fetch, ``Binding.finish`` puts the rest in
place once every rank has said that everything verifies.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from serai.checkpoint.format import Manifest, TensorEntry
from serai.checkpoint.layout import Box, span_pairs
from serai.checkpoint.source import Copy
from serai.checkpoint.state import (
    RNG,
    Path,
    Stateful,
    clean_name,
    dtensor_box,
    module_items,
    optimizer_names,
    parameter_names,
    unwrap,
)
from serai.checkpoint.values import decode
from serai.errors import CheckpointCorrupt, StateMismatch

__all__ = ["Binding", "Index", "bind", "torch_dtype"]

_MISSING = object()


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointCorrupt(f"{name} is no dtype of this torch")
    return dtype


class Index:
    """A manifest's tensors by path, as one rank sees them, and the trees of plain values."""

    def __init__(self, manifest: Manifest, values: bytes, rank: int, world_size: int) -> None:
        self.manifest = manifest
        self.rank = rank
        # A rank that did not exist at the save takes the part of one that did.
        self.source_rank = rank % max(1, manifest.world_size)
        self.same_world = world_size == manifest.world_size
        self.by_path: dict[Path, TensorEntry] = {}
        # Trees name a tensor as its rank did; where every rank keeps its own it is stored as NAME@RANK.
        self.by_name: dict[str, TensorEntry] = {}
        for name, entry in manifest.tensors.items():
            if entry.rank is None or entry.rank == self.source_rank:
                self.by_path[entry.path] = entry
                self.by_name[name if entry.rank is None else name.removesuffix(f"@{entry.rank}")] = entry
        try:
            document = json.loads(values)["values"]
            self.trees = {str(name): self._pick(tree) for name, tree in document.items()}
            self.per_rank = {str(name) for name, tree in document.items() if "ranks" in tree}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise CheckpointCorrupt(f"the stored values make no sense: {error!r}") from error

    def _pick(self, tree: dict[str, Any]) -> Any:
        return tree["same"] if "same" in tree else tree["ranks"][self.source_rank]

    def below(self, path: Path) -> dict[Path, TensorEntry]:
        """Entries below a path, by the rest of theirs."""
        depth = len(path)
        return {p[depth:]: e for p, e in self.by_path.items() if len(p) > depth and p[:depth] == path}


class Binding:
    """What one rank will read from a generation and do with it."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.copies: list[Copy] = []
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._alive: list[torch.Tensor] = []
        self._copy_backs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._setters: list[Callable[[], None]] = []
        self._last: list[Callable[[], None]] = []

    def read(self, entry: TensorEntry, box: Box, target: torch.Tensor) -> None:
        """Fetch ``box`` of a stored tensor into ``target``, the live local tensor that holds it."""
        dtype = torch_dtype(entry.dtype.name)
        direct = target.device.type == "cpu" and target.is_contiguous() and target.dtype == dtype
        direct = direct and not target.is_conj() and not target.is_neg()
        memory = target if direct else torch.empty(box.lengths, dtype=dtype)
        self._fetch(entry, box, memory)
        if not direct:
            self._copy_backs.append((target, memory))

    def replace_data(self, live: torch.Tensor, entry: TensorEntry) -> None:
        """A quantised tensor gets its scale with its integers: the live one takes over a whole new tensor."""
        whole = self._fetch_quantised(entry)

        def take_over() -> None:
            live.data = whole

        self.later(take_over)

    def new(self, entry: TensorEntry) -> torch.Tensor:
        """A fresh CPU tensor that will hold the whole stored tensor."""
        if entry.detail:
            return self._fetch_quantised(entry)
        tensor = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype.name))
        self._fetch(entry, Box.whole(entry.shape), tensor)
        return tensor

    def _fetch(self, entry: TensorEntry, box: Box, memory: torch.Tensor) -> None:
        self._alive.append(memory)
        address = memory.data_ptr()
        for piece in entry.pieces:
            common = box.intersect(piece.box)
            if common is None or not common.count:
                continue
            for source, target, nbytes in span_pairs(common, piece.box, box, entry.dtype.itemsize):
                self.copies.append(Copy(piece.file, piece.start + source, nbytes, address + target))

    def _fetch_quantised(self, entry: TensorEntry) -> torch.Tensor:
        detail = entry.detail or {}
        integers = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype.name))
        self._fetch(entry, Box.whole(entry.shape), integers)
        dtype = torch_dtype(str(detail["dtype"]))
        if detail["scheme"] == "per_tensor":
            scale, zero = float.fromhex(detail["scale"]), int(detail["zero_point"])
            whole = torch._empty_affine_quantized(entry.shape, scale=scale, zero_point=zero, dtype=dtype)
        else:
            scales = torch.tensor([float.fromhex(s) for s in detail["scales"]], dtype=torch.float64)
            zeros = torch.tensor([float.fromhex(z) for z in detail["zero_points"]])
            if not str(dtype).endswith("4x2") and all(float(z).is_integer() for z in zeros):
                zeros = zeros.to(torch.int64)
            whole = torch._empty_per_channel_affine_quantized(
                entry.shape, scales=scales, zero_points=zeros, axis=int(detail["axis"]), dtype=dtype
            )
        # The integers arrive later; a quantised tensor shares no memory with its int_repr.
        self._setters.insert(0, lambda: _set_integers(whole, integers))
        return whole

    def later(self, action: Callable[[], None], *, last: bool = False) -> None:
        (self._last if last else self._setters).append(action)

    def finish(self) -> None:
        """After the bytes are in place: device copies, then values and objects, then generators."""
        with torch.no_grad():
            for target, memory in self._copy_backs:
                target.copy_(memory)
            for action in self._setters:
                action()
        for action in self._last:
            action()

    def check(self, *, strict: bool) -> None:
        """Raise ``StateMismatch`` naming every problem when strict."""
        if strict and self.problems:
            shown = "\n".join(f"    {problem}" for problem in self.problems[:40])
            rest = f"\n    … and {len(self.problems) - 40} more" if len(self.problems) > 40 else ""
            raise StateMismatch(
                f"the state and the checkpoint of step {self.index.manifest.step} differ in "
                f"{len(self.problems)} places:\n{shown}{rest}",
                where=self.index.manifest.name,
                expected="the same names, shapes and dtypes",
                next_step="restore(state, strict=False) takes what matches and leaves the rest",
            )


def _set_integers(whole: torch.Tensor, integers: torch.Tensor) -> None:
    values = whole.int_repr()
    if values.shape != integers.shape:
        raise CheckpointCorrupt("a quantised tensor has another shape than its integers")
    import ctypes

    ctypes.memmove(
        whole.data_ptr(), integers.contiguous().data_ptr(), integers.numel() * integers.element_size()
    )


def bind(state: MutableMapping[str, Any], index: Index) -> Binding:
    """Match everything in ``state``. Problems are collected, nothing is changed."""
    binding = Binding(index)
    binder = _Binder(binding, parameter_names(state))
    for name, value in list(state.items()):
        tree = index.trees.get(name, _MISSING)
        if tree is _MISSING:
            binding.problems.append(f"{name}: not in the checkpoint (it has {', '.join(index.trees)})")
            continue
        if name in index.per_rank and not index.same_world and not isinstance(value, nn.Module):
            binding.notes.append(
                f"{name} was kept by each of {index.manifest.world_size} ranks; rank {index.rank} of another world "
                f"size takes that of rank {index.source_rank}"
            )
        new = binder.visit(value, tree, (name,))
        if new is not value:
            binder.replace(state, name, value, new)
    for name in index.trees:
        if name not in state:
            binding.problems.append(f"{name}: in the checkpoint, but not in the state")
    return binding


class _Binder:
    def __init__(self, binding: Binding, names: Mapping[int, str]) -> None:
        self.binding = binding
        self.index = binding.index
        self._names = names

    def visit(self, value: Any, tree: Any, path: Path) -> Any:
        """Bind one node; returns what its parent should hold afterwards (usually ``value`` itself)."""
        if isinstance(value, torch.Tensor):
            name = tree.get("$tensor") if isinstance(tree, dict) else None
            entry = self.index.by_name.get(name) if name else None
            self._bind_tensor(value, entry, _dotted(path))
            return value
        if isinstance(value, nn.Module):
            self._module(value, tree, path)
            return value
        if isinstance(value, torch.optim.Optimizer):
            self._optimizer(value, tree, path)
            return value
        if isinstance(value, Mapping):
            return self._mapping(value, tree, path)
        if isinstance(value, list) and isinstance(tree, list) and len(value) == len(tree):
            for i, item in enumerate(value):
                new = self.visit(item, tree[i], (*path, i))
                if new is not item:
                    self.replace(value, i, item, new)
            return value
        if isinstance(value, tuple) and isinstance(tree, dict) and len(tree.get("$tuple", ())) == len(value):
            return (
                type(value)(
                    self.visit(item, stored, (*path, i))
                    for i, (item, stored) in enumerate(zip(value, tree["$tuple"], strict=True))
                )
                if any(isinstance(item, torch.Tensor | Stateful) for item in value)
                else self._decode(tree)
            )
        if isinstance(value, Stateful) and not isinstance(value, type):
            self._stateful(value, tree)
            return value
        return self._decode(tree)

    def replace(self, container: Any, key: Any, old: Any, new: Any) -> None:
        """Set an entry at the end, unless it already holds an equal value."""

        def set_entry() -> None:
            container[key] = new

        self.binding.later(set_entry)

    def _decode(self, tree: Any) -> Any:
        return decode(tree, self._tensor_named, node=self._node)

    def _tensor_named(self, name: str) -> torch.Tensor:
        entry = self.index.by_name.get(name)
        if entry is None:
            raise CheckpointCorrupt(f"the stored values refer to the tensor {name!r}, which is not there")
        return self.binding.new(entry)

    def _node(self, tag: str, body: Any) -> Any:
        return rebuild_node(tag, body, self.index, self.binding.new)

    def _bind_tensor(self, live: torch.Tensor, entry: TensorEntry | None, where: str) -> None:
        if entry is None:
            self.binding.problems.append(f"{where}: not in the checkpoint")
            return
        if tuple(live.shape) != entry.shape:
            self.binding.problems.append(
                f"{where}: its shape is {tuple(live.shape)}, the checkpoint's is {entry.shape}"
            )
            return
        expected = str(entry.detail["dtype"]) if entry.detail else entry.dtype.name
        have = str(live.dtype).removeprefix("torch.")
        if have != expected:
            self.binding.problems.append(f"{where}: its dtype is {have}, the checkpoint's is {expected}")
        if isinstance(live, DTensor):
            box, _ = dtensor_box(live, where)
            local = live.to_local()
        else:
            box, local = Box.whole(live.shape), live
        if entry.detail:
            self.binding.replace_data(live, entry)
        elif box.count:
            self.binding.read(entry, box, local.detach())

    def _module(self, module: nn.Module, tree: Any, path: Path) -> None:
        body = tree.get("$module") if isinstance(tree, dict) else None
        if body is None:
            self.binding.problems.append(f"{_dotted(path)}: a module now, something else in the checkpoint")
            return
        stored = {p[0]: entry for p, entry in self.index.below(path).items() if len(p) == 1}
        for key, name in body.get("aliases", {}).items():
            if name in self.index.by_name:
                stored.setdefault(key, self.index.by_name[name])
        extra = body.get("extra", {})
        seen = set()
        live = module_items(module)
        filled = {id(value) for key, value in live.items() if key in stored}
        for key, value in live.items():
            seen.add(key)
            if isinstance(value, torch.Tensor):
                if key not in stored and id(value) in filled:
                    continue  # tied to one that is there: others store such weights once
                self._bind_tensor(value, stored.get(key), _dotted((*path, key)))
            elif key not in extra:
                self.binding.problems.append(f"{_dotted((*path, key))}: not in the checkpoint")
        for key in [*stored, *extra]:
            if key not in seen:
                self.binding.problems.append(
                    f"{_dotted((*path, str(key)))}: in the checkpoint, but not in the state"
                )
        present = {key: self._decode(document) for key, document in extra.items() if key in seen}
        if present:
            self.binding.later(lambda: _load_extra(module, present))

    def _optimizer(self, optimizer: torch.optim.Optimizer, tree: Any, path: Path) -> None:
        body = tree.get("$optimizer") if isinstance(tree, dict) else None
        if body is None:
            self.binding.problems.append(
                f"{_dotted(path)}: an optimizer now, something else in the checkpoint"
            )
            return
        names = optimizer_names(optimizer, self._names)
        live = {
            name: parameter
            for group, members in zip(optimizer.param_groups, names, strict=True)
            for name, parameter in zip(members, group["params"], strict=True)
        }
        stored_names = [name for group in body["param_groups"] for name in group["params"]]
        for name in stored_names:
            if name not in live:
                self.binding.problems.append(
                    f"{_dotted(path)}: the checkpoint's parameter {name} is not in the optimizer"
                )
        for name in live:
            if name not in stored_names:
                self.binding.problems.append(
                    f"{_dotted(path)}: the parameter {name} is not in the checkpoint"
                )
        state: dict[str, dict[str, Any]] = {}
        for rest, entry in self.index.below((*path, "state")).items():
            name, key = str(rest[0]), rest[1]
            if len(rest) != 2 or name not in live:
                continue
            state.setdefault(name, {})[str(key)] = self._optimizer_tensor(
                optimizer, live[name], str(key), entry, _dotted((*path, "state", *rest))
            )
        for name, values in body.get("values", {}).items():
            if name in live:
                for key, document in values.items():
                    state.setdefault(name, {})[key] = self._decode(document)
        groups = self._groups(optimizer, body, names)
        self.binding.later(lambda: _load_optimizer(optimizer, names, state, groups))

    def _optimizer_tensor(
        self,
        optimizer: torch.optim.Optimizer,
        parameter: torch.Tensor,
        key: str,
        entry: TensorEntry,
        where: str,
    ) -> torch.Tensor:
        """The live state tensor where it has the right shape, else a new one placed like its parameter."""
        existing = optimizer.state.get(parameter, {}).get(key)
        if isinstance(existing, torch.Tensor) and tuple(existing.shape) == entry.shape:
            self._bind_tensor(existing, entry, where)
            return existing
        dtype = torch_dtype(entry.dtype.name)
        if entry.shape == tuple(parameter.shape) and not entry.detail:
            # Uninitialised on purpose: every byte is read before anybody sees it.
            made = torch.empty_like(
                parameter, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format
            )
            self._bind_tensor(made, entry, where)
            return made
        return self.binding.new(entry)

    def _groups(
        self, optimizer: torch.optim.Optimizer, body: dict[str, Any], names: list[list[str]]
    ) -> list[dict[str, Any]]:
        """The stored hyperparameters for each live group: by position, or by the parameters they hold."""
        stored = body["param_groups"]
        if [group["params"] for group in stored] == names or len(stored) == len(names):
            chosen = stored if len(stored) == len(names) else []
        else:
            chosen = []
        if not chosen:
            by_name = {name: group for group in stored for name in group["params"]}
            chosen = [by_name.get(members[0], {}) if members else {} for members in names]
        return [
            {key: self._decode(value) for key, value in group.items() if key != "params"} for group in chosen
        ]

    def _mapping(self, value: Mapping[Any, Any], tree: Any, path: Path) -> Any:
        stored = _pairs(tree)
        if stored is None:
            return self._decode(tree)
        for key, item in value.items():
            document = stored.get(key, _MISSING)
            where = (*path, key if isinstance(key, int) and not isinstance(key, bool) else str(key))
            if document is _MISSING:
                self.binding.problems.append(f"{_dotted(where)}: not in the checkpoint")
                continue
            new = self.visit(item, document, where)
            if new is not item:
                self.replace(value, key, item, new)
        for key, document in stored.items():
            if key not in value:
                if _holds_tensor(document):
                    self.binding.problems.append(
                        f"{_dotted((*path, str(key)))}: in the checkpoint, but not in the state"
                    )
                elif isinstance(value, MutableMapping):
                    self.replace(value, key, None, self._decode(document))
        return value

    def _stateful(self, value: Any, tree: Any) -> None:
        decoded = self._decode(tree)
        if isinstance(value, RNG):
            index = self.index

            def load() -> None:
                value.load_state_dict(decoded)
                if index.rank >= index.manifest.world_size:
                    value.fork(index.rank)

            self.binding.later(load, last=True)
        else:
            self.binding.later(lambda: value.load_state_dict(decoded))


def rebuild_node(tag: str, body: Any, index: Index, make: Callable[[TensorEntry], Any]) -> Any:
    """A stored module or optimizer as the plain dict its ``state_dict`` would be."""
    path = tuple(k if isinstance(k, int) else str(k) for k in body["path"])

    def tensor(name: str) -> Any:
        return make(index.by_name[name])

    if tag == "$module":
        result: dict[Any, Any] = {p[0]: make(entry) for p, entry in index.below(path).items() if len(p) == 1}
        for key, name in body.get("aliases", {}).items():
            source = index.by_name[name].path
            result[key] = result[source[-1]] if source[:-1] == path else tensor(name)
        for key, document in body.get("extra", {}).items():
            result[key] = decode(document, tensor)
        return result
    state: dict[str, dict[str, Any]] = {}
    for rest, entry in index.below((*path, "state")).items():
        if len(rest) == 2:
            state.setdefault(str(rest[0]), {})[str(rest[1])] = make(entry)
    for name, values in body.get("values", {}).items():
        for key, document in values.items():
            state.setdefault(name, {})[key] = decode(document, tensor)
    groups = [{key: decode(value, tensor) for key, value in group.items()} for group in body["param_groups"]]
    return {"state": state, "param_groups": groups}


def _dotted(path: Path) -> str:
    return ".".join(str(key) for key in path)


def _pairs(tree: Any) -> dict[Any, Any] | None:
    """The entries of a stored mapping, by their real keys."""
    if not isinstance(tree, dict):
        return None
    if len(tree) == 1:
        tag = next(iter(tree))
        if tag in ("$dict", "$ordered", "$counter"):
            return {decode(key, lambda _: None): document for key, document in tree[tag]}
        if str(tag).startswith("$"):
            return None
    return dict(tree)


def _holds_tensor(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(tag in ("$tensor", "$module", "$optimizer") for tag in tree) or any(
            map(_holds_tensor, tree.values())
        )
    return isinstance(tree, list) and any(map(_holds_tensor, tree))


def _load_extra(module: nn.Module, values: dict[str, Any]) -> None:
    """Give a module its extra state; tensors are in place already and are handed over as they are."""
    inner = unwrap(module)
    live = inner.state_dict(keep_vars=True)
    whole = {key: values.get(clean_name(key), value) for key, value in live.items()}
    inner.load_state_dict(whole)


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    names: list[list[str]],
    state: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    numbered: dict[int, dict[str, Any]] = {}
    document_groups = []
    number = 0
    for members, group, live in zip(names, groups, optimizer.param_groups, strict=True):
        indices = []
        for name in members:
            if name in state:
                numbered[number] = state[name]
            indices.append(number)
            number += 1
        defaults = {key: value for key, value in live.items() if key != "params"}
        document_groups.append({**defaults, **group, "params": indices})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.load_state_dict({"state": numbered, "param_groups": document_groups})
    # torch casts state to the parameter's dtype when it loads; what was saved is what must be there.
    parameters = {
        name: parameter
        for members, group in zip(names, optimizer.param_groups, strict=True)
        for name, parameter in zip(members, group["params"], strict=True)
    }
    for name, values in state.items():
        loaded = optimizer.state[parameters[name]]
        for key, value in values.items():
            now = loaded.get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                loaded[key] = value.to(now.device)
