"""Damage at rest: bits flipped, files cut, deleted, swapped, grown, blanked, replaced by something else."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import serai
from benchmarks.faults.crashes import scratch
from benchmarks.faults.judge import Judge, Saved, Verdict, make_state
from benchmarks.faults.machine import agent_in_thread
from benchmarks.faults.tally import Outcome, Tally

__all__ = ["damages", "make_root", "try_damage"]

Key = tuple[int, int]
Act = Callable[[Path], object]
_BLOCK = 4096
QUIET = "missing manifest"  # a folder without a manifest is no checkpoint: nothing needs to be said


@dataclass(frozen=True)
class Damage:
    """One way to harm a root. ``hurt`` are the generations whose files it touched."""

    kind: str
    what: str
    act: Act
    hurt: tuple[str, ...]
    quiet: bool = False


def make_root(root: Path, steps: list[int]) -> dict[str, Saved]:
    """A root with one generation a step, all kept."""
    saves = {}
    with agent_in_thread(root), serai.Checkpointer(root, keep=serai.Keep(last=len(steps))) as checkpointer:
        for mark, step in enumerate(steps, 1):
            handle = checkpointer.save(step, make_state(mark))
            handle.wait("durable", 60)
            _, _, attempt, sequence = handle.generation.split("-")
            saves[handle.generation] = Saved((int(attempt), int(sequence)), step, mark)
    return saves


def damages(root: Path, rng: random.Random, *, flips_in_shards: int, every_byte: bool) -> Iterator[Damage]:
    """Every damage to the newest generation, to the two newest, and between generations."""
    names = sorted(
        (p.name for p in root.iterdir() if p.name.startswith("step-")),
        key=lambda n: n.split("-")[2:],
        reverse=True,
    )
    newest, second = names[0], names[1]
    files = sorted(p.name for p in (root / newest).iterdir() if p.is_file())
    for file in files:
        path = root / newest / file
        size = path.stat().st_size
        small = not file.startswith("shard")
        places = (
            list(range(size))
            if small and every_byte
            else _sample(rng, size, 24 if small else flips_in_shards)
        )
        for place in places:
            yield _on(
                newest, file, f"bit flip in {_sort(file)}", f"byte {place}", _flip(place, rng.randrange(8))
            )
        yield from _one_file(newest, file, size, rng)
        yield from _between(newest, second, file)
    for kind, act in (
        ("folder deleted", lambda r: shutil.rmtree(r / newest)),
        ("folder replaced by a file", lambda r: (shutil.rmtree(r / newest), (r / newest).write_bytes(b"x"))),
        ("folder is a link to outside", lambda r: _link_out(r, newest, None)),
    ):
        yield Damage(kind, newest, act, (newest,), quiet=True)
    for file in files:
        yield Damage(
            "a newer file in an older folder",
            file,
            lambda r, file=file: (r / names[-1] / file).write_bytes((r / newest / file).read_bytes()),
            (names[-1],),
        )
    yield Damage("a whole copy beside it", newest, lambda r: shutil.copytree(r / newest, r / "copy"), ())
    yield Damage("folders swapped", f"{newest} and {second}", lambda r: _swap(r / newest, r / second), ())
    for file in files:
        both = [_on(name, file, "", "", _flip(7, 3)) for name in (newest, second)]
        yield Damage(
            "two newest damaged",
            file,
            lambda r, both=both: [one.act(r) for one in both],
            (newest, second),
        )
        every = [_on(name, file, "", "", _flip(9, 5)) for name in names]
        yield Damage("all damaged", file, lambda r, every=every: [one.act(r) for one in every], tuple(names))
    for place in range(8):
        yield Damage(
            "latest.json damaged",
            f"byte {place}",
            lambda r, place=place: _flip(place, 1)(r / "latest.json"),
            (),
        )
    yield Damage("latest.json deleted", "", lambda r: (r / "latest.json").unlink(), ())
    yield Damage("attempts deleted", "", lambda r: shutil.rmtree(r / "attempts"), ())


def _sort(file: str) -> str:
    return "shards" if file.startswith("shard") else file


def _sample(rng: random.Random, size: int, count: int) -> list[int]:
    return sorted(rng.sample(range(size), min(size, count)))


def _on(folder: str, file: str, kind: str, what: str, act: Act, quiet: bool = False) -> Damage:
    return Damage(kind, f"{file}: {what}", lambda root: act(root / folder / file), (folder,), quiet)


def _flip(place: int, bit: int) -> Act:
    def act(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 1 << bit
        path.write_bytes(data)

    return act


def _one_file(folder: str, file: str, size: int, rng: random.Random) -> Iterator[Damage]:
    manifest = file == "manifest.json"

    def on(kind: str, what: str, act: Act, quiet: bool = False) -> Damage:
        return _on(folder, file, kind, what, act, quiet)

    cuts = sorted({0, 1, 7, 8, 9, size // 2, size - 1, size - 9, *_sample(rng, size, 12)})
    for cut in cuts:
        yield on("cut short", f"to {cut} bytes", lambda p, cut=cut: os.truncate(p, cut))
    yield on("deleted", "", lambda p: p.unlink(), manifest)
    for count in (1, 9, 4096, 1 << 20):
        yield on(
            "garbage appended",
            f"{count} bytes",
            lambda p, count=count: p.write_bytes(p.read_bytes() + random.Random(count).randbytes(count)),
        )
    for block in range(0, size, _BLOCK):
        yield on("block of zeros", f"at {block}", lambda p, block=block: _overwrite(p, block, bytes(_BLOCK)))
        yield on(
            "block of garbage",
            f"at {block}",
            lambda p, block=block: _overwrite(p, block, random.Random(block).randbytes(_BLOCK)),
        )
    yield on("all zeros", "", lambda p: p.write_bytes(bytes(p.stat().st_size)))
    yield on("empty text", "", lambda p: p.write_bytes(b"{}"))
    yield on("a folder in its place", "", lambda p: (p.unlink(), p.mkdir()), manifest)
    yield on("a pipe in its place", "", lambda p: (p.unlink(), os.mkfifo(p)), manifest)
    yield on("a link to itself", "", lambda p: (p.unlink(), p.symlink_to(p)), manifest)
    yield on("a link to nothing", "", lambda p: (p.unlink(), p.symlink_to(p.with_name("gone"))), manifest)
    yield Damage(
        "a link to outside", file, lambda root: _link_out(root, folder, file), (folder,), quiet=False
    )


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    part = data[: len(content) - offset]
    if content[offset : offset + len(part)] == part:
        part = bytes(byte ^ 1 for byte in part)  # it held that already: make it a damage
    content[offset : offset + len(part)] = part
    path.write_bytes(content)


def _between(newest: str, second: str, file: str) -> Iterator[Damage]:
    yield Damage(
        "files swapped between generations",
        file,
        lambda root: _swap(root / newest / file, root / second / file),
        (newest, second),
    )
    yield Damage(
        "an older file in its place",
        file,
        lambda root: (root / newest / file).write_bytes((root / second / file).read_bytes()),
        (newest,),
    )


def _swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _link_out(root: Path, folder: str, file: str | None) -> None:
    """The same bytes, but outside of the root and reached by a link."""
    outside = root.parent / "outside"
    shutil.rmtree(outside, ignore_errors=True)
    outside.mkdir()
    inside = root / folder / file if file else root / folder
    target = outside / inside.name
    shutil.move(inside, target)
    inside.symlink_to(target)


def try_damage(tally: Tally, *, seed: int, flips_in_shards: int, every_byte: bool) -> None:
    """Judge restore, restore of the named step, and load, on every damage."""
    rng = random.Random(f"{seed}/damage")
    base = Path(scratch())
    pristine, root = base / "pristine", base / "root"
    saves = make_root(pristine, [10, 20, 30])
    judge = Judge(saves)
    keys = {name: saved.key for name, saved in saves.items()}
    try:
        for damage in damages(pristine, rng, flips_in_shards=flips_in_shards, every_byte=every_byte):
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(pristine, root)
            damage.act(root)
            verdict = _judge(judge, root, damage, keys, saves)
            tally.add(damage.kind, verdict.outcome, f"{damage.what}: {verdict.detail}")
    finally:
        judge.close()
        shutil.rmtree(base, ignore_errors=True)


def _judge(
    judge: Judge, root: Path, damage: Damage, keys: dict[str, Key], saves: dict[str, Saved]
) -> Verdict:
    newest = max(keys.values())
    intact = max((key for name, key in keys.items() if name not in damage.hurt), default=None)
    verdict = judge.try_restore(root, least=newest, may_fail=intact is None)
    if verdict.outcome in (Outcome.WRONG, Outcome.HUNG):
        return verdict
    if verdict.outcome is Outcome.OLDER:
        if intact is None or verdict.key is None or verdict.key < intact:
            return Verdict(Outcome.WRONG, f"lost although {intact} is intact: {verdict.detail}")
        if not damage.quiet and not verdict.warned:
            return Verdict(Outcome.WRONG, f"walked back without a word: {verdict.detail}")
    again = judge.try_load(root, like=verdict)
    if again.outcome in (Outcome.WRONG, Outcome.HUNG):
        return again
    # The damaged step by name: its own right bytes or an error, never another's.
    named = next(saved for saved in saves.values() if saved.key == newest)
    by_name = judge.try_restore(root, least=newest, step=named.step, may_fail=bool(damage.hurt))
    if by_name.outcome in (Outcome.WRONG, Outcome.HUNG):
        return Verdict(by_name.outcome, f"step={named.step}: {by_name.detail}")
    if by_name.outcome is Outcome.OLDER:
        return Verdict(Outcome.WRONG, f"step={named.step} gave {by_name.detail}")
    return verdict
