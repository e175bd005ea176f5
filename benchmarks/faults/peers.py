"""The same faults against torch.distributed.checkpoint, where they apply, for the table beside ours."""

from __future__ import annotations

import errno
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.faults.crashes import scratch
from benchmarks.faults.tally import Outcome, Tally

__all__ = ["ENGINE", "try_dcp"]

ENGINE = "torch DCP"


def _state(mark: int) -> dict[str, Any]:
    return {
        "weight": torch.full((1500,), float(mark)),
        "bias": torch.full((7, 3), mark, dtype=torch.int64),
        "moment": torch.full((900,), float(mark)),
    }


def _load(folder: Path) -> tuple[str, int | str]:
    """``("right", mark)``, ``("mixed", what)`` or ``("error", reason)``."""
    state = _state(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.load(state, checkpoint_id=str(folder), no_dist=True)
        except BaseException as error:  # DCP wraps failures in its own BaseException-like classes
            return "error", f"{type(error).__name__}: {error}".splitlines()[0][:200]
    marks = {float(value) for tensor in state.values() for value in tensor.double().flatten().unique()}
    if len(marks) == 1:
        return "right", int(marks.pop())
    return "mixed", f"values {sorted(marks)[:4]}"


def _save(folder: Path, mark: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_state(mark), checkpoint_id=str(folder), no_dist=True)


def _judge(folder: Path, mark: int) -> tuple[Outcome, str]:
    kind, found = _load(folder)
    if kind == "error":
        return Outcome.ERROR, str(found)
    if kind == "right" and found == mark:
        return Outcome.NEWEST, ""
    return Outcome.WRONG, f"loaded without an error: {found}, saved was {mark}"


def _harms(path: Path, rng: random.Random, flips: int) -> Iterator[tuple[str, str, Callable[[Path], None]]]:
    size = path.stat().st_size
    name = "metadata" if path.name == ".metadata" else "shards"
    for place in sorted(rng.sample(range(size), min(size, flips))):
        bit = 1 << rng.randrange(8)
        yield f"bit flip in {name}", f"byte {place}", lambda p, place=place, bit=bit: _flip(p, place, bit)
    for cut in sorted({0, 1, size // 2, size - 1, *rng.sample(range(size), 10)}):
        yield f"cut short: {name}", f"to {cut}", lambda p, cut=cut: os.truncate(p, cut)
    yield f"deleted: {name}", "", lambda p: p.unlink()
    for block in range(0, size, 4096):
        yield f"block of zeros in {name}", f"at {block}", lambda p, block=block: _zero(p, block)


def _flip(path: Path, place: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


def _zero(path: Path, block: int) -> None:
    data = bytearray(path.read_bytes())
    part = len(data[block : block + 4096])
    data[block : block + part] = bytes(part)
    path.write_bytes(data)


def try_dcp(tally: Tally, *, seed: int, flips: int) -> None:
    """Damage at rest, an older shard in a newer checkpoint, a full disk, saving over an earlier checkpoint."""
    rng = random.Random(f"{seed}/dcp")
    base = Path(scratch())
    pristine, hurt = base / "pristine", base / "hurt"
    try:
        _save(pristine, 3)
        for path in sorted(pristine.iterdir()):
            for kind, what, act in _harms(path, rng, flips):
                shutil.rmtree(hurt, ignore_errors=True)
                shutil.copytree(pristine, hurt)
                act(hurt / path.name)
                tally.add(kind, *_named(_judge(hurt, 3), what), engine=ENGINE)
        older = base / "older"
        _save(older, 2)
        for path in sorted(pristine.iterdir()):
            shutil.rmtree(hurt, ignore_errors=True)
            shutil.copytree(pristine, hurt)
            shutil.copy(older / path.name, hurt / path.name)
            tally.add("an older file in its place", *_named(_judge(hurt, 3), path.name), engine=ENGINE)
        for number in range(40):
            for asynchronous in (False, True):
                outcome = _full(base / f"full-{number}-{asynchronous}", number, asynchronous)
                if outcome is not None:
                    name = "async_save" if asynchronous else "save"
                    tally.add(f"ENOSPC over an earlier {name} of the same id", *outcome, engine=ENGINE)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _named(verdict: tuple[Outcome, str], what: str) -> tuple[Outcome, str]:
    return verdict[0], f"{what}: {verdict[1]}"


@contextmanager
def _no_room(after: int, hits: list[str]) -> Iterator[None]:
    """The n-th and all later calls that write to the checkpoint fail, in every thread."""
    import builtins
    import io

    real_open, real_fsync, real_rename = io.open, os.fsync, os.rename
    count = [0]

    def strike(what: str) -> None:
        count[0] += 1
        if count[0] > after:
            hits.append(what)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what)

    class Full(io.FileIO):
        def write(self, data: Any, /) -> int:
            strike("write")
            return int(super().write(data))

    def opened(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if "full-" in str(path) and "w" in mode:
            strike("open")
            return io.BufferedWriter(Full(path, "wb"), 512)
        return real_open(path, mode, *rest, **options)

    def fsync(descriptor: int) -> None:
        strike("fsync")
        real_fsync(descriptor)

    def rename(source: Any, target: Any, **options: Any) -> None:
        if "full-" in str(target):
            strike("rename")
        real_rename(source, target, **options)

    builtins.open, io.open, os.fsync, os.rename = opened, opened, fsync, rename
    try:
        yield
    finally:
        builtins.open, io.open, os.fsync, os.rename = real_open, real_open, real_fsync, real_rename


def _full(folder: Path, after: int, asynchronous: bool) -> tuple[Outcome, str] | None:
    """Step 2 is saved over step 1 on a full disk: step 1, step 2 or an error when saving, never less."""
    _save(folder, 1)
    hits: list[str] = []
    told = ""
    with _no_room(after, hits):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if asynchronous:
                    answer: Any = dcp.async_save(_state(2), checkpoint_id=str(folder), no_dist=True)
                    assert isinstance(answer, Future)
                    answer.result(60)
                else:
                    dcp.save(_state(2), checkpoint_id=str(folder), no_dist=True)
        except BaseException as error:
            told = f"{type(error).__name__}"
    if not hits:
        return None
    kind, found = _load(folder)
    shutil.rmtree(folder, ignore_errors=True)
    where = f"at call {after} ({hits[0]}); the save {'raised ' + told if told else 'said nothing'}; "
    if kind == "right" and (found == 2 or (told and found == 1)):
        return (Outcome.ERROR if told else Outcome.NEWEST), where
    if kind == "error":
        return Outcome.WRONG, where + f"step 1 is lost: {found}"
    return Outcome.WRONG, where + f"loaded without an error: {found}"
