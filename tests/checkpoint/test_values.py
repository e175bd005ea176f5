"""Plain values survive JSON bit for bit; what only pickle could carry is refused by name."""

from __future__ import annotations

import collections
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serai.checkpoint.values import MAX_DEPTH, TensorRef, decode, encode
from serai.errors import CheckpointCorrupt, UnsafeObject

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(), max_size=8)
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False)
)
keys = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)) | st.none()
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from(["$tensor", "$tuple", "$", "a"]), inner, max_size=2)
    ),
    max_leaves=12,
)


def round_trip(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, "x"))), TensorRef)


@given(trees)
def test_round_trip(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    assert repr(back) == repr(value)


def test_not_a_number_keeps_its_payload() -> None:
    odd = struct.unpack(">d", bytes.fromhex("7ff80000deadbeef"))[0]
    assert struct.pack(">d", round_trip(odd)).hex() == "7ff80000deadbeef"
    assert round_trip([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert math.copysign(1, round_trip(-0.0)) == -1


def test_types_that_state_dicts_hold() -> None:
    value = {
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "set": {1, 2},
        "float32": np.float32(0.1),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "tensor": TensorRef("model.weight"),
    }
    back = round_trip(value)
    assert list(back["ordered"]) == ["b", "a"]
    assert isinstance(back["ordered"], collections.OrderedDict)
    assert back["size"] == torch.Size([2, 3])
    assert back["dtype"] is torch.bfloat16
    assert back["float32"].tobytes() == np.float32(0.1).tobytes()
    np.testing.assert_array_equal(back["array"], value["array"])
    assert back["tensor"] == TensorRef("model.weight")


def test_lone_surrogates_survive() -> None:
    assert round_trip({"\ud800": "\udfff"}) == {"\ud800": "\udfff"}


def test_objects_are_refused_with_their_place() -> None:
    with pytest.raises(UnsafeObject) as caught:
        encode({"scheduler": [1, Path("x")]}, "state")
    assert caught.value.code == "S405"
    assert caught.value.where == "state.scheduler[1]"
    assert "PosixPath" in str(caught.value)


@pytest.mark.parametrize(
    "document",
    [{"$evil": 1}, {"$dtype": "load"}, {"$numpy": ["|O", [1], ""]}, {"$bytes": "%%"}, {"$float": "00"}],
)
def test_a_strange_document_is_corrupt_not_executed(document: Any) -> None:
    with pytest.raises(CheckpointCorrupt):
        decode(document, TensorRef)


def test_endless_nesting_is_refused_both_ways() -> None:
    deep: Any = []
    for _ in range(MAX_DEPTH + 5):
        deep = [deep]
    with pytest.raises(UnsafeObject):
        encode(deep, "x")
    with pytest.raises(CheckpointCorrupt):
        decode(deep, TensorRef)
