"""Records what a process does to one folder, call by call, and can make any of the calls fail.

The storage layer reaches the file system through functions of ``os`` and two of libc; both are replaced
while a recording runs. ``Recorder.check`` proves afterwards that nothing went past: the recorded calls,
replayed, must give the folder as it is.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serai.storage import _posix

__all__ = ["Call", "Recorder"]

Key = tuple[int, int]


@dataclass(frozen=True)
class Call:
    """One call that changed the folder, or a mark.

    ``kind`` is ``create``, ``write``, ``truncate``, ``allocate``, ``sync`` (a file), ``syncdir``,
    ``rename``, ``link``, ``unlink``, ``mkdir``, ``rmdir``, or ``durable`` (the commit of ``key`` returned).
    Paths are relative to the root; ``inode`` numbers files.
    """

    kind: str
    path: str = ""
    target: str = ""
    inode: int = 0
    offset: int = 0
    data: bytes = b""
    size: int = 0
    key: Key | None = None


# Called with (kind, path) before a call is made; may raise OSError in its place.
Fault = Callable[[str, str], None]


class Recorder:
    """Use as a context manager around the work; ``calls`` is the recording."""

    def __init__(self, root: Path, *, fault: Fault | None = None) -> None:
        self.root = Path(os.path.realpath(root))
        self.calls: list[Call] = []
        self.fault = fault
        self._lock = threading.RLock()
        self._inodes: dict[int, str | int] = {}
        self._open: dict[int, tuple[str, int]] = {}  # descriptor → (path, inode; -1 for a folder)
        self._real: dict[str, Any] = {}
        self._libc: Any = None

    def mark_durable(self, key: Key) -> None:
        with self._lock:
            self.calls.append(Call("durable", key=key))

    def _relative(self, path: Any) -> str | None:
        try:
            text = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return None
        root = str(self.root)
        if text == root:
            return "."
        return text[len(root) + 1 :] if text.startswith(root + "/") else None

    def _strike(self, kind: str, path: str) -> None:
        if self.fault is not None:
            self.fault(kind, path)

    def __enter__(self) -> Recorder:
        wrappers = {
            "open": self._os_open,
            "close": self._os_close,
            "write": self._os_write,
            "pwrite": self._os_pwrite,
            "ftruncate": self._os_ftruncate,
            "fsync": self._os_fsync,
            "fdatasync": self._os_fsync,
            "rename": self._os_rename,
            "replace": self._os_rename,
            "link": self._os_link,
            "unlink": self._os_unlink,
            "remove": self._os_unlink,
            "mkdir": self._os_mkdir,
            "rmdir": self._os_rmdir,
        }
        for name, wrapper in wrappers.items():
            self._real[name] = getattr(os, name)
            setattr(os, name, wrapper)
        self._libc = _posix._libc
        _posix._libc = _Libc(self, self._libc)  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        _posix._libc = self._libc
        for name, real in self._real.items():
            setattr(os, name, real)

    # The replacements

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        relative = None if dir_fd is not None else self._relative(path)
        if relative is None:
            return int(self._real["open"](path, flags, mode, dir_fd=dir_fd))
        with self._lock:
            creates = bool(flags & os.O_CREAT) and not os.path.lexists(path)
            if creates:
                self._strike("create", relative)
            descriptor = int(self._real["open"](path, flags, mode))
            found = os.fstat(descriptor)
            if os.path.isdir(path):
                self._open[descriptor] = (relative, -1)
                return descriptor
            self._open[descriptor] = (relative, found.st_ino)
            if creates:
                self.calls.append(Call("create", relative, inode=found.st_ino))
            elif flags & os.O_TRUNC:
                self.calls.append(Call("truncate", relative, inode=found.st_ino))
            return descriptor

    def _os_close(self, descriptor: int) -> None:
        with self._lock:
            self._open.pop(descriptor, None)
        self._real["close"](descriptor)

    def _os_write(self, descriptor: int, data: Any) -> int:
        place = self._open.get(descriptor)
        if place is None:
            return int(self._real["write"](descriptor, data))
        with self._lock:
            return self._wrote(
                place,
                lambda count: os.lseek(descriptor, 0, os.SEEK_CUR) - count,  # appending moves it first
                data,
                lambda: self._real["write"](descriptor, data),
            )

    def _os_pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        place = self._open.get(descriptor)
        if place is None:
            return int(self._real["pwrite"](descriptor, data, offset))
        with self._lock:
            return self._wrote(
                place,
                lambda count: offset,
                data,
                lambda: self._real["pwrite"](descriptor, data, offset),
            )

    def _wrote(
        self, place: tuple[str, int], offset: Callable[[int], int], data: Any, act: Callable[[], int]
    ) -> int:
        self._strike("write", place[0])
        count = int(act())
        written = bytes(memoryview(data)[:count])
        self.calls.append(Call("write", place[0], inode=place[1], offset=offset(count), data=written))
        return count

    def _os_ftruncate(self, descriptor: int, size: int) -> None:
        place = self._open.get(descriptor)
        if place is None:
            self._real["ftruncate"](descriptor, size)
            return
        with self._lock:
            self._strike("truncate", place[0])
            self._real["ftruncate"](descriptor, size)
            self.calls.append(Call("truncate", place[0], inode=place[1], size=size))

    def allocated(self, descriptor: int, size: int, act: Callable[[], int]) -> int:
        place = self._open.get(descriptor)
        if place is None:
            return act()
        with self._lock:
            self._strike("allocate", place[0])
            answer = act()
            if answer == 0:
                self.calls.append(Call("allocate", place[0], inode=place[1], size=size))
            return answer

    def _os_fsync(self, descriptor: int) -> None:
        place = self._open.get(descriptor)
        if place is None:
            self._real["fsync"](descriptor)
            return
        with self._lock:
            kind = "syncdir" if place[1] < 0 else "sync"
            self._strike(kind, place[0])
            self._real["fsync"](descriptor)
            self.calls.append(Call(kind, place[0], inode=place[1]))

    def _two(self, kind: str, name: str, source: Any, target: Any, **options: Any) -> None:
        first, second = self._relative(source), self._relative(target)
        if first is None or second is None:
            self._real[name](source, target, **options)
            return
        with self._lock:
            self._strike(kind, second)
            self._real[name](source, target, **options)
            self.calls.append(Call(kind, first, second))

    def _os_rename(self, source: Any, target: Any, **options: Any) -> None:
        self._two("rename", "rename", source, target, **options)

    def renamed(self, source: Any, target: Any, act: Callable[[], int]) -> int:
        first, second = self._relative(source), self._relative(target)
        with self._lock:
            if second is not None:
                self._strike("rename", second)
            answer = act()
            if answer == 0 and first is not None and second is not None:
                self.calls.append(Call("rename", first, second))
            return answer

    def _os_link(self, source: Any, target: Any, **options: Any) -> None:
        self._two("link", "link", source, target, **options)

    def _one(self, kind: str, name: str, path: Any, *rest: Any, **options: Any) -> None:
        relative = None if options.get("dir_fd") is not None else self._relative(path)
        if relative is None or relative == ".":  # the root itself is taken as given
            self._real[name](path, *rest, **options)
            return
        with self._lock:
            self._strike(kind, relative)
            self._real[name](path, *rest, **options)
            self.calls.append(Call(kind, relative))

    def _os_unlink(self, path: Any, **options: Any) -> None:
        self._one("unlink", "unlink", path, **options)

    def _os_mkdir(self, path: Any, *rest: Any, **options: Any) -> None:
        self._one("mkdir", "mkdir", path, *rest, **options)

    def _os_rmdir(self, path: Any, **options: Any) -> None:
        self._one("rmdir", "rmdir", path, **options)


class _Libc:
    """The two calls that Python lacks, watched; everything else is libc's own."""

    def __init__(self, recorder: Recorder, real: Any) -> None:
        self._recorder = recorder
        self._real = real

    def fallocate(self, descriptor: int, mode: int, offset: Any, size: Any) -> int:
        try:
            return self._recorder.allocated(
                descriptor, int(size.value), lambda: int(self._real.fallocate(descriptor, mode, offset, size))
            )
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return -1

    def renameat2(self, from_fd: int, source: bytes, to_fd: int, target: bytes, flags: Any) -> int:
        try:
            return self._recorder.renamed(
                source, target, lambda: int(self._real.renameat2(from_fd, source, to_fd, target, flags))
            )
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
