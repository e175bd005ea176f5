"""The files: valid safetensors, a manifest that notices every change and points nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from serai.checkpoint.format import ALIGNMENT, DTYPES, FileEntry, Manifest, Piece, TensorEntry, pack_header
from serai.checkpoint.hashing import hex_digest
from serai.checkpoint.layout import Box
from serai.errors import CheckpointCorrupt


def manifest() -> Manifest:
    tensors = {
        "a": TensorEntry(
            "a",
            ("m", "a"),
            DTYPES["float32"],
            (4, 2),
            (Piece(0, 4096, Box((0, 0), (2, 2))), Piece(1, 4096, Box((2, 0), (2, 2)))),
        ),
        "s": TensorEntry("s", ("s",), DTYPES["int64"], (), (Piece(0, 4112, Box((), ())),)),
    }
    files = (
        FileEntry("shard-00000-of-00002.safetensors", 4120, ("00",)),
        FileEntry("shard-00001-of-00002.safetensors", 4112, ("11",)),
    )
    return Manifest("run", 7, 2, 3, 1.5, 2, files, tensors, 10, "ff", {"serai": "0"}, {"loss": 0.25})


def resealed(document: dict[str, Any]) -> bytes:
    document.pop("checksum", None)
    body = json.dumps(document, separators=(",", ":")).encode()[:-1]
    return body + b',"checksum":"' + hex_digest(body).encode() + b'"}\n'


def test_manifest_round_trip() -> None:
    assert Manifest.from_bytes(manifest().to_bytes(), "here") == manifest()


@settings(deadline=None)
@given(st.data())
def test_every_flipped_bit_is_noticed(data: st.DataObject) -> None:
    raw = bytearray(manifest().to_bytes())
    place = data.draw(st.integers(0, len(raw) - 2))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CheckpointCorrupt) as caught:
        Manifest.from_bytes(bytes(raw), "here")
    assert caught.value.where == "here"


@pytest.mark.parametrize("cut", [0, 1, 50, -3, -40])
def test_a_cut_manifest_is_noticed(cut: int) -> None:
    with pytest.raises(CheckpointCorrupt):
        Manifest.from_bytes(manifest().to_bytes()[:cut], "here")


def edit(path: list[Any], value: Any) -> bytes:
    document = json.loads(manifest().to_bytes())
    node = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return resealed(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["files", 0, "name"], "../../etc/passwd"),
        (["files", 0, "name"], "/etc/passwd"),
        (["files", 0, "name"], "a/b"),
        (["files", 0, "name"], "shard-00001-of-00002.safetensors"),
        (["files", 0, "bytes"], 1 << 62),
        (["files", 0, "bytes"], -1),
        (["files", 0, "chunks"], []),
        (["files", 0, "chunk_bytes"], 0),
        (["files", 0, "hash"], "md5"),
        (["tensors", "a", "shape"], [1 << 40, 1 << 40]),
        (["tensors", "a", "shape"], [4, True]),
        (["tensors", "a", "dtype"], "object"),
        (["tensors", "a", "pieces", 0, "start"], 1 << 40),
        (["tensors", "a", "pieces", 0, "file"], 9),
        (["tensors", "a", "pieces", 0, "file"], -1),
        (["tensors", "a", "pieces", 1, "offsets"], [0, 0]),
        (["tensors", "a", "pieces", 1, "lengths"], [3, 2]),
        (["tensors", "a", "pieces"], []),
        (["values", "name"], "../values.json"),
        (["world_size"], "2"),
        (["schema_version"], 99),
        (["format"], "zip"),
        (["tensors"], 3),
        (["files"], None),
    ],
)
def test_a_strangers_manifest_is_refused(path: list[Any], value: Any) -> None:
    with pytest.raises(CheckpointCorrupt):
        Manifest.from_bytes(edit(path, value), "here")


def test_unknown_keys_of_a_newer_serai_are_ignored() -> None:
    assert Manifest.from_bytes(edit(["novelty"], {"a": 1}), "here") == manifest()


def test_the_header_is_safetensors_own() -> None:
    pieces = [
        ("w", DTYPES["float32"], (2, 3), 24),
        ("é/b[0:1]", DTYPES["bool"], (5,), 5),
        ("c", DTYPES["complex128"], (), 16),
    ]
    header = pack_header(pieces)
    assert len(header) % ALIGNMENT == 0
    data = bytes(range(45))
    found = dict(deserialize(header + data))
    assert found["w"]["shape"] == [2, 3]
    assert bytes(found["w"]["data"]) == data[:24]
    assert bytes(found["é/b[0:1]"]["data"]) == data[24:29]
    assert found["c"]["dtype"] == "U8"
    assert found["c"]["shape"] == [16]
