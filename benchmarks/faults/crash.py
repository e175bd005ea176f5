"""What a disk may hold after a power cut: every legal outcome of a recording, as an image on disk.

The model is harsher than the usual file systems. What is certain: bytes of a file once the file was
flushed after they were written, names in a folder once the folder was flushed. What is not: any block of
an unflushed write may be missing, alone (writes are torn and reordered); a size may be new with zeros in
it; a name may appear without the bytes behind it, or bytes without the name; names of one folder appear
in order (journals) or in any selection (no journal). A rename is one step, as POSIX has it.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.recorder import Call

__all__ = ["Disk", "Image", "Projector", "variants"]

Image = dict[str, bytes | None]  # relative path → content, None for a folder

_ROOT = 0


@dataclass
class _File:
    durable: bytes = b""
    pending: list[Call] = field(default_factory=list)


@dataclass
class _Folder:
    durable: dict[str, int] = field(default_factory=dict)
    pending: list[tuple[str, ...]] = field(
        default_factory=list
    )  # ("set", name, node) | ("del", name) | ("move", …)


class Disk:
    """The state of files and folders while a recording is played, durable and pending apart."""

    def __init__(self, start: Image | None = None) -> None:
        self._files: dict[int, _File] = {}
        self._folders: dict[int, _Folder] = {_ROOT: _Folder()}
        self._live: dict[str, int] = {".": _ROOT}
        self._by_inode: dict[int, int] = {}
        self._next = 1
        for path, content in sorted((start or {}).items()):
            parent, name = self._parent(path)
            node = self._new()
            if content is None:
                self._folders[node] = _Folder()
            else:
                self._files[node] = _File(content)
            self._folders[parent].durable[name] = node
            self._live[path] = node

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _parent(self, path: str) -> tuple[int, str]:
        above, _, name = path.rpartition("/")
        return self._live[above or "."], name

    def play(self, call: Call) -> None:
        """Advance by one recorded call."""
        match call.kind:
            case "durable":
                pass
            case "create" | "mkdir":
                parent, name = self._parent(call.path)
                node = self._new()
                if call.kind == "mkdir":
                    self._folders[node] = _Folder()
                else:
                    self._files[node] = _File()
                    self._by_inode[call.inode] = node
                self._live[call.path] = node
                self._folders[parent].pending.append(("set", name, str(node)))
            case "write" | "truncate" | "allocate":
                self._file(call).pending.append(call)
            case "sync":
                file = self._file(call)
                file.durable = _apply(file.durable, file.pending)
                file.pending.clear()
            case "syncdir":
                folder = self._folders[self._live[call.path]]
                folder.durable = _names(folder.durable, folder.pending)
                folder.pending.clear()
            case "rename":
                self._rename(call)
            case "link":
                parent, name = self._parent(call.target)
                node = self._live[call.path]
                self._live[call.target] = node
                self._folders[parent].pending.append(("set", name, str(node)))
            case "unlink" | "rmdir":
                parent, name = self._parent(call.path)
                del self._live[call.path]
                self._folders[parent].pending.append(("del", name))
            case _:
                raise ValueError(f"the model knows no {call.kind}")

    def _file(self, call: Call) -> _File:
        # An inode number is used again once its file is gone: the path decides where it is known.
        return self._files[self._live.get(call.path) or self._by_inode[call.inode]]

    def _rename(self, call: Call) -> None:
        parent, name = self._parent(call.path)
        above, new = self._parent(call.target)
        if parent != above:
            raise ValueError(f"a rename between folders is not modelled: {call}")
        node = self._live.pop(call.path)
        self._live[call.target] = node
        for path in [p for p in self._live if p.startswith(call.path + "/")]:
            self._live[call.target + path[len(call.path) :]] = self._live.pop(path)
        self._folders[parent].pending.append(("move", name, new, str(node)))

    # Images

    def everything(self) -> Image:
        """All calls took effect: what a killed process leaves behind."""
        return self._image(lambda f: f.pending, lambda f: f.pending)

    def _image(
        self,
        writes: Callable[[_File], Sequence[Call]],
        names: Callable[[_Folder], Sequence[tuple[str, ...]]],
    ) -> Image:
        image: Image = {}

        def walk(node: int, prefix: str, depth: int) -> None:
            folder = self._folders[node]
            for name, child in _names(folder.durable, names(folder)).items():
                path = prefix + name
                if child in self._folders:
                    image[path] = None
                    if depth < 16:
                        walk(child, path + "/", depth + 1)
                else:
                    file = self._files[child]
                    image[path] = _apply(file.durable, writes(file))

        walk(_ROOT, "", 0)
        return image

    def pending(self) -> bool:
        return any(f.pending for f in self._files.values()) or any(f.pending for f in self._folders.values())

    def images(self, rng: random.Random, count: int) -> Iterator[tuple[str, Image]]:
        """Named outcomes of a crash now: the extremes, then ``count`` drawn at random."""
        yield "process killed", self.everything()
        if not self.pending():
            return
        yield "power cut, nothing unflushed survives", self._image(lambda f: (), lambda f: ())
        yield "power cut, names without bytes", self._image(_sizes_only, lambda f: f.pending)
        yield "power cut, empty files", self._image(lambda f: (), lambda f: f.pending)
        yield "power cut, bytes without names", self._image(lambda f: f.pending, lambda f: ())
        for number in range(count):
            if number % 2:
                kind = "power cut, names in any selection"
                chosen = _selection(rng)
            else:
                kind = "power cut, names in order"
                chosen = _prefix(rng)
            yield kind, self._image(_torn(rng, rng.choice((512, 4096))), chosen)


def _selection(rng: random.Random) -> Callable[[_Folder], list[tuple[str, ...]]]:
    return lambda folder: [operation for operation in folder.pending if rng.random() < 0.5]


def _prefix(rng: random.Random) -> Callable[[_Folder], list[tuple[str, ...]]]:
    return lambda folder: folder.pending[: rng.randint(0, len(folder.pending))]


def _names(entries: dict[str, int], pending: Sequence[tuple[str, ...]]) -> dict[str, int]:
    result = dict(entries)
    for operation in pending:
        if operation[0] == "set":
            result[operation[1]] = int(operation[2])
        elif operation[0] == "del":
            result.pop(operation[1], None)
        else:
            result.pop(operation[1], None)
            result[operation[2]] = int(operation[3])
    return result


def _apply(content: bytes, pending: Sequence[Call]) -> bytes:
    data = bytearray(content)
    for call in pending:
        if call.kind == "truncate":
            del data[call.size :]
            data.extend(bytes(call.size - len(data)))
        elif call.kind == "allocate":
            data.extend(bytes(max(0, call.size - len(data))))
        else:
            end = call.offset + len(call.data)
            data.extend(bytes(max(0, end - len(data))))
            data[call.offset : end] = call.data
    return bytes(data)


def _sizes_only(file: _File) -> list[Call]:
    return [
        Call("write", offset=c.offset, data=bytes(len(c.data))) if c.kind == "write" else c
        for c in file.pending
    ]


def _torn(rng: random.Random, block: int) -> Callable[[_File], list[Call]]:
    """A selection of the pending writes, block by block, in a random order; sizes come or stay away."""

    def choose(file: _File) -> list[Call]:
        chance = rng.choice((0.1, 0.5, 0.9))
        parts: list[Call] = []
        for call in file.pending:
            if call.kind != "write":
                if rng.random() < 0.5:
                    parts.append(call)
                continue
            parts.extend(
                Call("write", offset=call.offset + begin, data=call.data[begin : begin + block])
                for begin in range(0, len(call.data), block)
                if rng.random() < chance
            )
        writes = [part for part in parts if part.kind == "write"]
        rng.shuffle(writes)
        shuffled = iter(writes)
        return [next(shuffled) if part.kind == "write" else part for part in parts]

    return choose


def variants(
    calls: Sequence[Call], rng: random.Random, per_point: int, start: Image | None = None
) -> Iterator[tuple[int, str, Image, tuple[int, int] | None]]:
    """Every crash point of a recording with its images: ``(point, kind, image, newest durable key)``."""
    disk = Disk(start)
    newest: tuple[int, int] | None = None
    for point in range(len(calls) + 1):
        for kind, image in disk.images(rng, per_point):
            yield point, kind, image, newest
        if point < len(calls):
            call = calls[point]
            disk.play(call)
            if call.key is not None:
                newest = call.key if newest is None else max(newest, call.key)


def read_tree(root: Path) -> Image:
    """A folder as an image."""
    image: Image = {}
    for below, folders, files in os.walk(root):
        image.update((os.path.relpath(os.path.join(below, name), root), None) for name in folders)
        for name in files:
            path = Path(below, name)
            image[os.path.relpath(path, root)] = path.read_bytes()
    return image


class Projector:
    """Keeps one folder on disk and turns it into one image after another, changing what differs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._shown: dict[str, str | None] = {}
        root.mkdir(parents=True, exist_ok=True)

    def show(self, image: Image) -> str:
        """Make the folder equal to ``image``; a fingerprint of it."""
        wanted = {
            path: None if content is None else hashlib.blake2b(content, digest_size=12).hexdigest()
            for path, content in image.items()
        }
        for path in sorted(self._shown.keys() - wanted.keys(), reverse=True):
            self._drop(path)
        for path in sorted(wanted):
            if path in self._shown and self._shown[path] == wanted[path]:
                continue
            if path in self._shown and (self._shown[path] is None or wanted[path] is None):
                self._drop(path)
            content = image[path]
            if content is None:
                (self.root / path).mkdir(exist_ok=True)
            else:
                (self.root / path).write_bytes(content)
        self._shown = wanted
        return hashlib.blake2b(repr(sorted(wanted.items())).encode(), digest_size=12).hexdigest()

    def _drop(self, path: str) -> None:
        place = self.root / path
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        for below in [p for p in self._shown if p == path or p.startswith(path + "/")]:
            self._shown.pop(below, None)

    def reset(self) -> None:
        """Forget what is there: somebody else wrote into the folder."""
        shutil.rmtree(self.root)
        self.root.mkdir(parents=True)
        self._shown = {}
