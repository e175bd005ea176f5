"""Plain values as JSON with tags: everything a ``state_dict`` holds beside tensors, without pickle.

JSON's own types are themselves (a float keeps every bit). Everything else is an object with one key
that starts with ``$``: ``{"$tuple": [...]}``, ``{"$bytes": base64}``, ``{"$float": "nan:7ff8…"}``,
``{"$dict": [[key, value], ...]}`` for keys that are not plain strings, ``{"$tensor": name}`` for a
tensor stored in a shard. The reader accepts only these tags and constructs only these types.
"""

from __future__ import annotations

import base64
import collections
import enum
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from serai.errors import CheckpointCorrupt, UnsafeObject

__all__ = ["MAX_DEPTH", "Node", "TensorRef", "decode", "encode"]

MAX_DEPTH = 200


class TensorRef:
    """Stands in the tree of values for a tensor that is stored in a shard under ``name``."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"TensorRef({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorRef) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class Node:
    """An already encoded part of the tree: ``{tag: body}``, such as a module's or an optimizer's."""

    __slots__ = ("body", "tag")

    def __init__(self, tag: str, body: Any) -> None:
        self.tag = tag
        self.body = body


def encode(value: Any, where: str, *, depth: int = 0) -> Any:
    """Turn a value into JSON. Raises ``UnsafeObject`` naming the place of what only pickle could carry."""
    if depth > MAX_DEPTH:
        raise UnsafeObject(f"values are nested deeper than {MAX_DEPTH} levels", where=where)
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return value
    if kind is str:
        return (
            value
            if _is_unicode(value)
            else {"$text": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
        )
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is TensorRef:
        return {"$tensor": value.name}
    if kind is Node:
        return {value.tag: value.body}
    if kind is list:
        return [encode(item, f"{where}[{i}]", depth=depth + 1) for i, item in enumerate(value)]
    if kind is tuple:
        return {"$tuple": [encode(item, f"{where}[{i}]", depth=depth + 1) for i, item in enumerate(value)]}
    if kind in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
        return _encode_mapping(value, where, depth)
    if kind in (bytes, bytearray):
        return {f"${kind.__name__}": base64.b64encode(value).decode()}
    if kind in (set, frozenset):
        items = sorted(value, key=repr)
        return {f"${kind.__name__}": [encode(item, where, depth=depth + 1) for item in items]}
    if kind is complex:
        return {"$complex": struct.pack(">dd", value.real, value.imag).hex()}
    if isinstance(value, np.generic):
        return {"$numpy": [value.dtype.str, [], base64.b64encode(value.tobytes()).decode()]}
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return {
            "$numpy": [
                value.dtype.str,
                list(value.shape),
                base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(),
            ]
        }
    special = _encode_torch(value)
    if special is not None:
        return special
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"$tuple": [encode(item, f"{where}[{i}]", depth=depth + 1) for i, item in enumerate(value)]}
    if isinstance(value, enum.Enum):
        raise UnsafeObject(
            f"{where} is an enum member of {kind.__module__}.{kind.__qualname__}, which only pickle could carry",
            where=where,
            expected="plain values, tensors, or objects with state_dict",
            next_step="store its .value or .name",
        )
    plain = _as_plain(value)
    if plain is not None:
        return encode(plain, where, depth=depth)
    raise UnsafeObject(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which only pickle could carry",
        where=where,
        expected="tensors, plain values (None, bool, int, float, str, bytes, list, tuple, dict, set, numpy), "
        "or objects with state_dict and load_state_dict",
        next_step="store a plain form of it, or give the object a state_dict",
    )


def decode(
    document: Any,
    tensor: Callable[[str], Any],
    *,
    node: Callable[[str, Any], Any] | None = None,
    depth: int = 0,
) -> Any:
    """Turn JSON back into values.

    ``tensor(name)`` supplies what stands behind a tensor reference, ``node(tag, body)`` what stands
    behind a module or an optimizer.
    """
    if depth > MAX_DEPTH:
        raise CheckpointCorrupt(f"stored values are nested deeper than {MAX_DEPTH} levels")
    if document is None or isinstance(document, bool | int | float | str):
        return document
    if isinstance(document, list):
        return [decode(item, tensor, node=node, depth=depth + 1) for item in document]
    if not isinstance(document, dict):
        raise CheckpointCorrupt(f"stored values hold a {type(document).__name__}")
    if len(document) == 1:
        (tag, body), *_ = document.items()
        if tag.startswith("$"):
            try:
                return _decode_tag(tag, body, tensor, node, depth)
            except (ValueError, TypeError, KeyError, IndexError, struct.error, AttributeError) as error:
                raise CheckpointCorrupt(f"stored value {tag} does not decode: {error}") from error
    return {key: decode(item, tensor, node=node, depth=depth + 1) for key, item in document.items()}


def _as_plain(value: Any) -> Any:
    """A subclass of a built-in type as that type; its extra behaviour is code, not state."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return list(value)
    return dict(value) if isinstance(value, dict) else None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_mapping(value: Any, where: str, depth: int) -> Any:
    plain = type(value) is dict and all(type(key) is str and _is_unicode(key) for key in value)
    if plain and not (len(value) == 1 and next(iter(value)).startswith("$")):
        return {key: encode(item, f"{where}.{key}", depth=depth + 1) for key, item in value.items()}
    tag = {"OrderedDict": "$ordered", "Counter": "$counter"}.get(type(value).__name__, "$dict")
    return {
        tag: [
            [encode(key, where, depth=depth + 1), encode(item, f"{where}.{key}", depth=depth + 1)]
            for key, item in value.items()
        ]
    }


def _encode_torch(value: Any) -> Any:
    module = type(value).__module__
    if not module.startswith("torch"):
        return None
    import torch

    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    return None


def _decode_tag(
    tag: str, body: Any, tensor: Callable[[str], Any], node: Callable[[str, Any], Any] | None, depth: int
) -> Any:
    if tag in ("$module", "$optimizer") and node is not None:
        return node(tag, body)
    if tag == "$tensor":
        return tensor(str(body))
    if tag in ("$tuple", "$set", "$frozenset"):
        items = [decode(item, tensor, node=node, depth=depth + 1) for item in body]
        return {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag](items)
    if tag in ("$dict", "$ordered", "$counter"):
        pairs = [
            (
                decode(key, tensor, node=node, depth=depth + 1),
                decode(item, tensor, node=node, depth=depth + 1),
            )
            for key, item in body
        ]
        if tag == "$ordered":
            return collections.OrderedDict(pairs)
        return collections.Counter(dict(pairs)) if tag == "$counter" else dict(pairs)
    if tag == "$float":
        return struct.unpack(">d", bytes.fromhex(body))[0]
    if tag == "$complex":
        return complex(*struct.unpack(">dd", bytes.fromhex(body)))
    if tag in ("$bytes", "$bytearray"):
        raw = base64.b64decode(body, validate=True)
        return bytearray(raw) if tag == "$bytearray" else raw
    if tag == "$text":
        return base64.b64decode(body, validate=True).decode("utf-8", "surrogatepass")
    if tag == "$numpy":
        return _decode_numpy(body)
    if tag in ("$dtype", "$device", "$size"):
        return _decode_torch(tag, body)
    raise CheckpointCorrupt(
        f"stored values use the unknown tag {tag!r}", expected="a newer serai, or an intact file"
    )


def _decode_numpy(body: Any) -> Any:
    name, shape, data = body
    dtype = np.dtype(name)
    if dtype.kind not in "biufcMm":
        raise CheckpointCorrupt(f"stored numpy value has the type {name!r}")
    array = np.frombuffer(base64.b64decode(data, validate=True), dtype=dtype)
    return array.reshape(shape).copy() if shape else array[0]


def _decode_torch(tag: str, body: Any) -> Any:
    import torch

    if tag == "$dtype":
        dtype = getattr(torch, str(body))
        if not isinstance(dtype, torch.dtype):
            raise CheckpointCorrupt(f"stored dtype {body!r} is none")
        return dtype
    return torch.device(body) if tag == "$device" else torch.Size(body)
