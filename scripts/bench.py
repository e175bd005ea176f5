"""Measures on this machine, in one run: storing a large object, and saving a training state.

    make bench           # or: .venv/bin/python scripts/bench.py [--size 1GiB] [--folder DIR] [--json]

Every figure is the median of several rounds; GB/s is 10⁹ bytes a second. The methods of a group write the
same bytes to the same folder, and all of them wait until the bytes are on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import serai
from serai.storage.local import LocalStorage
from serai.units import format_bytes, parse_bytes


def timed(act: Callable[[], Any], rounds: int) -> float:
    """Median seconds of ``act``."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        act()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def plain_write(path: Path, data: memoryview) -> None:
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def storage(folder: Path, size: int, rounds: int) -> list[dict[str, Any]]:
    """Storing one object of ``size`` bytes."""
    import mmap

    memory = mmap.mmap(-1, size)
    view = memoryview(memory)
    view[:] = os.urandom(1 << 20) * (size >> 20)
    chunks = [view[begin : begin + (16 << 20)] for begin in range(0, size, 16 << 20)]
    direct, buffered = LocalStorage(folder / "direct"), LocalStorage(folder / "buffered", direct=False)
    methods: dict[str, Callable[[], Any]] = {
        "serai upload (past the page cache)": lambda: direct.upload("object", chunks, size),
        "serai upload (through it)": lambda: buffered.upload("object", chunks, size),
        "write + fsync": lambda: plain_write(folder / "plain", view),
    }
    return [
        {
            "group": "store",
            "method": name,
            "seconds": (seconds := timed(act, rounds)),
            "gb_per_s": size / seconds / 1e9,
        }
        for name, act in methods.items()
    ]


def saving(folder: Path, size: int, rounds: int) -> list[dict[str, Any]]:
    """Saving a state of ``size`` bytes: how long training waits, and until the bytes are on the disk."""
    tensors = {f"weight.{n}": torch.rand(4 << 20) for n in range(size // (16 << 20))}
    total = sum(tensor.nbytes for tensor in tensors.values())
    other = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    def copy() -> None:
        for name, tensor in tensors.items():
            other[name].copy_(tensor)

    def torch_save() -> None:
        with open(folder / "torch.pt", "wb") as stream:
            torch.save(tensors, stream)
            stream.flush()
            os.fsync(stream.fileno())

    copy()
    rows = [
        {"group": "save", "method": "one warm copy in memory", "seconds": timed(copy, rounds)},
        {"group": "save", "method": "torch.save + fsync", "seconds": timed(torch_save, rounds)},
    ]
    blocked, durable = [], []
    with_checkpointer = serai.Checkpointer(folder / "serai")
    try:
        for step in range(rounds + 1):
            begin = time.perf_counter()
            handle = with_checkpointer.save(step, {"model": tensors})
            blocked.append(time.perf_counter() - begin)
            handle.wait(tier="durable", timeout=600)
            durable.append(time.perf_counter() - begin)
    finally:
        with_checkpointer.close(timeout=600)
    # The first save makes the slab; training pays for it once.
    rows += [
        {"group": "save", "method": "serai save (training waits)", "seconds": statistics.median(blocked[1:])},
        {"group": "save", "method": "serai save until durable", "seconds": statistics.median(durable[1:])},
        {"group": "save", "method": "serai first save (training waits)", "seconds": blocked[0]},
    ]
    return [{**row, "gb_per_s": total / row["seconds"] / 1e9} for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--size", default="1GiB", type=parse_bytes, help="bytes of the object and of the state"
    )
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--folder", default=".", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-") as name:
        rows = storage(Path(name), options.size, options.rounds) + saving(
            Path(name), options.size, options.rounds
        )
    if options.json:
        print(json.dumps({"schema_version": 1, "bytes": options.size, "rows": rows}))
        return 0
    print(f"{format_bytes(options.size)}, median of {options.rounds} rounds")
    for row in rows:
        print(
            f"  {row['group']:<6} {row['method']:<36} {row['seconds'] * 1e3:9.1f} ms  {row['gb_per_s']:6.2f} GB/s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
