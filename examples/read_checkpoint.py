"""Reads a serai checkpoint with numpy alone, verified by xxhash: python read_checkpoint.py ROOT [STEP]

docs/checkpointing.md describes the format. Types that numpy lacks come as bytes, with one more dimension.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import xxhash

NUMPY = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "complex128": "<c16", "complex64": "<c8"}
NUMPY |= {f"{u}int{8 * size}": f"<{u or 'i'}{size}" for u in ("", "u") for size in (1, 2, 4, 8)}
NUMPY["bool"] = "?"
OTHERS = {"bfloat16": 2, "complex32": 4}  # bytes; every other type has one


def check(data, digest, what):
    if xxhash.xxh3_128_hexdigest(data) != digest:
        raise ValueError(f"{what} does not verify")


def manifests(root):
    """Folder and manifest of every checkpoint; a folder without a manifest that verifies is none."""
    for path in Path(root).glob("*/manifest.json"):
        data = path.read_bytes()
        body, found, tail = data.rpartition(b',"checksum":"')
        if found and tail[:32].decode("ascii", "replace") == xxhash.xxh3_128_hexdigest(body):
            yield path.parent, json.loads(data)


def read(root, step=None):
    """The newest checkpoint (of a step): manifest, plain values, and tensors by name."""
    found = [(m["attempt"], m["sequence"], f, m) for f, m in manifests(root) if step in (None, m["step"])]
    *_, folder, manifest = max(found, key=lambda entry: entry[:2])
    values = (folder / "values.json").read_bytes()
    check(values, manifest["values"]["digest"], "values.json")
    files = [np.fromfile(folder / file["name"], np.uint8) for file in manifest["files"]]
    for data, file in zip(files, manifest["files"], strict=True):
        for number, digest in enumerate(file["chunks"]):
            start = number * file["chunk_bytes"]
            check(data[start : start + file["chunk_bytes"]].data, digest, f"{file['name']}@{start}")
    tensors = {}
    for name, tensor in manifest["tensors"].items():
        kind = NUMPY.get(tensor["dtype"])
        size = np.dtype(kind).itemsize if kind else OTHERS.get(tensor["dtype"], 1)
        whole = np.empty((*tensor["shape"], size), np.uint8)
        for piece in tensor["pieces"]:
            box = tuple(slice(at, at + n) for at, n in zip(piece["offsets"], piece["lengths"], strict=True))
            part = files[piece["file"]][piece["start"] :][: math.prod(piece["lengths"]) * size]
            whole[box] = part.reshape(*piece["lengths"], size)
        tensors[name] = whole.view(kind)[..., 0] if kind else whole
    return manifest, json.loads(values)["values"], tensors


if __name__ == "__main__":
    for name, array in read(sys.argv[1], *map(int, sys.argv[2:3]))[2].items():
        print(f"{name:<48} {array.dtype!s:<10} {array.shape}")
