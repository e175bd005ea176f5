"""What differs, by how much, from real checkpoints; and tensors put together from any boxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.samples import raw

import serai
from serai.checkpoint.diff import DiffReport, diff
from serai.checkpoint.format import DTYPES, FileEntry, Manifest, Piece, TensorEntry
from serai.checkpoint.hashing import hex_digest
from serai.checkpoint.layout import Box
from serai.checkpoint.stream import TensorStream, open_stream, rechunk, select
from serai.errors import CheckpointCorrupt, StateMismatch
from serai.storage.local import LocalStorage


def save(root: Path, state: dict[str, Any]) -> None:
    with serai.Checkpointer(root) as checkpointer:
        checkpointer.save(1, state)


def compare(tmp_path: Path, a: dict[str, Any], b: dict[str, Any], **options: Any) -> DiffReport:
    save(tmp_path / "a", a)
    save(tmp_path / "b", b)
    return diff(open_stream(tmp_path / "a", None), open_stream(tmp_path / "b", None), **options)


def test_equal_states_are_the_same(tmp_path: Path) -> None:
    state = {"x": {"nan": torch.tensor([float("nan"), 1.0]), "empty": torch.zeros(0, 3)}, "n": 3}
    report = compare(tmp_path, state, state)
    assert report.same
    assert report.equal_tensors == 2


def test_by_how_much(tmp_path: Path) -> None:
    left: dict[str, Any] = {
        "t": {
            "f32": torch.tensor([1.0, -2.0, 0.0, 4.0]),
            "bf16": torch.tensor([1.0, 2.0]).bfloat16(),
            "f8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
            "int": torch.tensor([5, -5], dtype=torch.int64),
            "complex": torch.tensor([3 + 4j]),
            "nan": torch.tensor([1.0, float("nan"), float("inf")]),
            "zero": torch.tensor([0.0, 1.0]),
            "gone": torch.ones(2),
            "shape": torch.ones(2, 3),
            "dtype": torch.ones(2),
        },
        "v": {"lr": 0.1, "betas": (0.9, 0.99), "same": [1, 2], "gone": "x"},
    }
    right: dict[str, Any] = {
        "t": {
            "f32": torch.tensor([1.0, -2.5, 0.0, 5.0]),
            "bf16": torch.tensor([1.0, 2.5]).bfloat16(),
            "f8": torch.tensor([1.0, 4.0]).to(torch.float8_e4m3fn),
            "int": torch.tensor([5, 5], dtype=torch.int64),
            "complex": torch.tensor([0j]),
            "nan": torch.tensor([float("nan"), 2.0, float("inf")]),
            "zero": torch.tensor([-0.0, 1.0]),
            "shape": torch.ones(3, 2),
            "dtype": torch.ones(2, dtype=torch.float64),
            "new": torch.ones(()),
        },
        "v": {"lr": 0.2, "betas": (0.9, 0.95), "same": [1, 2], "new": None},
    }
    report = compare(tmp_path, left, right)
    assert not report.same
    found = {t.name.removeprefix("t."): t for t in report.tensors}
    assert (found["f32"].count, found["f32"].total) == (2, 4)
    assert (found["f32"].max_abs, found["f32"].max_rel) == (1.0, 0.2)
    assert (found["bf16"].count, found["bf16"].max_abs) == (1, 0.5)
    assert (found["f8"].count, found["f8"].max_abs, found["f8"].max_rel) == (1, 2.0, 0.5)
    assert (found["int"].count, found["int"].max_abs, found["int"].max_rel) == (1, 10.0, 2.0)
    assert (found["complex"].max_abs, found["complex"].max_rel) == (5.0, 1.0)
    assert (found["nan"].count, found["nan"].not_finite, found["nan"].max_abs) == (2, 2, None)
    assert (found["zero"].count, found["zero"].max_abs, found["zero"].max_rel) == (1, 0.0, 0.0)
    kinds = {name: found[name].kind for name in ("gone", "new", "shape", "dtype")}
    assert kinds == {"gone": "missing", "new": "extra", "shape": "shape", "dtype": "dtype"}
    assert found["shape"].left == "float32 2×3"
    assert {v.path: (v.left, v.right) for v in report.values} == {
        "v.lr": ("0.1", "0.2"),
        "v.betas": ("[0.9, 0.99]", "[0.9, 0.95]"),
        "v.gone": ('"x"', "(absent)"),
        "v.new": ("(absent)", "null"),
    }


def test_only_below_some_keys(tmp_path: Path) -> None:
    a = {"m": {"x": torch.ones(1), "y": torch.ones(1)}, "n": 1}
    b = {"m": {"x": torch.zeros(1), "y": torch.zeros(1)}, "n": 2}
    report = compare(tmp_path, a, b, keys=["m.y"])
    assert [t.name for t in report.tensors] == ["m.y"]
    assert report.values == ()


def test_damage_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    save(tmp_path / "a", {"x": torch.arange(1000.0)})
    save(tmp_path / "b", {"x": torch.arange(1000.0)})
    (shard,) = (tmp_path / "b").glob("step-*/shard-*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=r"does not verify.*\bx\b"):
        diff(open_stream(tmp_path / "a", None), open_stream(tmp_path / "b", None))


def test_two_ranks_are_put_together(two_ranks: tuple[Path, dict[str, torch.Tensor]]) -> None:
    root, expected = two_ranks
    stream = open_stream(root, None)
    tensors = select(stream.manifest, None)
    assert {name for name in tensors if "mine" in name} == {"mine.tensor@0", "mine.tensor@1"}
    for name in ("rows", "columns", "whole"):
        assert stream.array(tensors[f"weights.{name}"]).tobytes() == raw(expected[name]), name
    assert stream.array(tensors["model.plain"]).tobytes() == raw(expected["plain"])
    assert len(tensors["weights.rows"].pieces) == len(tensors["weights.columns"].pieces) == 2


def test_a_key_that_names_nothing(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"weight": torch.ones(1)}})
    with pytest.raises(StateMismatch, match="modle") as caught:
        select(open_stream(tmp_path, None).manifest, ["modle"])
    assert "model" in str(caught.value.expected)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that cover it exactly once, cut along any dimensions."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.lengths[d]))
        low, high = list(box.lengths), list(box.lengths)
        low[d], high[d] = at, box.lengths[d] - at
        offsets = list(box.offsets)
        offsets[d] += at
        parts = [Box(box.offsets, tuple(low)), Box(tuple(offsets), tuple(high))]
        boxes += [part for part in parts if part.count]
    return shape, draw(st.permutations(boxes))


@settings(deadline=None, max_examples=60)
@given(cut_tensors())
def test_any_boxes_give_the_whole_tensor(tmp_path_factory: pytest.TempPathFactory, cut: Any) -> None:
    shape, boxes = cut
    whole = torch.arange(Box.whole(shape).count, dtype=torch.int16).reshape(shape)
    data, pieces = b"", []
    for box in boxes:
        pieces.append(Piece(0, len(data), box))
        data += raw(whole[box.within(Box.whole(shape))])
    chunks = tuple(hex_digest(data[i : i + 7]) for i in range(0, len(data), 7))
    entry = TensorEntry("t", ("t",), DTYPES["int16"], shape, tuple(pieces))
    manifest = Manifest("", 1, 1, 0, 0.0, 1, (FileEntry("f", len(data), chunks, 7),), {"t": entry}, 0, "")
    root = tmp_path_factory.mktemp("cut")
    (root / "g").mkdir()
    (root / "g" / "f").write_bytes(data)
    assert TensorStream(LocalStorage(root), "g", manifest).array(entry).tobytes() == raw(whole)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=9), max_size=8), st.integers(1, 5))
def test_rechunking_keeps_the_bytes(parts: list[bytes], size: int) -> None:
    found = [bytes(part) for part in rechunk(parts, size)]
    assert b"".join(found) == b"".join(parts)
    assert all(len(part) == size for part in found[:-1])
