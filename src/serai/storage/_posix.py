"""System calls that Python lacks, errno → serai's errors, and the writer of one file."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path
from types import TracebackType

from serai.errors import (
    NotFoundInStorage,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageTransient,
)

__all__ = ["BLOCK", "NO_LINKS", "FileWriter", "address_of", "rename_no_replace", "translate"]

NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""What ``link`` answers where a filesystem has no hard links (FAT, some network filesystems)."""

BLOCK = 4096
_DIRECT_WRITE = 8 << 20
_BOUNCE = 4 << 20
_RENAME_NOREPLACE = 1
_AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)


def rename_no_replace(source: Path, target: Path) -> bool:
    """``renameat2`` with ``RENAME_NOREPLACE``: ``False`` when ``target`` exists."""
    while True:
        result = _libc.renameat2(
            _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(_RENAME_NOREPLACE)
        )
        if result == 0:
            return True
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number == errno.EEXIST:
            return False
        if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise StorageError(
                "this filesystem can neither link nor rename without replacing",
                code="S306",
                where=str(target),
                expected="a filesystem with hard links or RENAME_NOREPLACE",
                next_step="keep the checkpoints on another filesystem (ext4, xfs, NFS, Lustre, tmpfs)",
            )
        raise OSError(number, os.strerror(number), str(target))


def translate(error: OSError, *, key: str, root: Path, action: str) -> StorageError:
    """The error of the storage family that ``error`` means, with the place it happened at."""
    where = str(root / key)
    reason = os.strerror(error.errno) if error.errno else str(error)
    match error.errno:
        case errno.ENOTDIR | errno.EEXIST if action == "write":
            return StorageError(
                f"a file stands where {key} needs a folder",
                where=where,
                expected="folders only on the way to an object",
                next_step=f"remove that file below {root}, or choose another folder",
            )
        case errno.ENOENT | errno.ENOTDIR:
            return NotFoundInStorage(
                f"there is no {key or 'such folder'} to {action}", where=where, next_step=f"ls {root}"
            )
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return StorageDenied(
                f"this user may not {action} {key}: {reason}",
                where=where,
                expected=f"read and write permission for user {os.geteuid()}",
                next_step=f"ls -ld {root}; mount | grep {root.anchor}",
            )
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return StorageFull(
                f"no room to {action} {key}: {reason}",
                where=where,
                expected=f"free space or quota; now free: {_free(root)}",
                next_step=f"df -h {root}; quota; or free space there and run again",
            )
        case errno.ETIMEDOUT | errno.ESTALE | errno.EAGAIN:
            return StorageTransient(
                f"could not {action} {key}: {reason}", where=where, next_step="run again; check the mount"
            )
        case _:
            return StorageError(
                f"could not {action} {key}: {reason} ({errno.errorcode.get(error.errno or 0, error.errno)})",
                where=where,
                expected="a filesystem that reads and writes",
                next_step="dmesg | tail: the kernel says more about a failing disk",
            )


def _free(root: Path) -> str:
    while not root.exists():
        root = root.parent
    with contextlib.suppress(OSError):
        found = os.statvfs(root)
        return f"{found.f_bavail * found.f_frsize >> 20} MiB"
    return "unknown"


class FileWriter:
    """Writes one existing file of ``size`` bytes, from several threads at once, and flushes it.

    With ``direct`` the bytes go past the page cache: straight from the caller's memory where it is
    aligned to 4 KiB, through an aligned buffer where it is not. A filesystem that refuses (``EINVAL``)
    is written through the page cache from then on.
    """

    def __init__(self, path: Path, size: int, *, direct: bool) -> None:
        self._size = size
        self._bounces: list[mmap.mmap] = []
        self._lock = threading.Lock()
        self._buffered = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._opened = [self._buffered]
        self._direct: int | None = None
        try:
            # Asks for the room at once: a full disk is found before the bytes, and blocks that exist
            # can be written by several threads at a time.
            if size and not _allocate(self._buffered, size):
                os.ftruncate(self._buffered, size)
            if direct and size >= BLOCK and hasattr(os, "O_DIRECT"):
                with contextlib.suppress(OSError):
                    self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
                    self._opened.append(self._direct)
        except BaseException:
            self.close()
            raise

    @property
    def is_direct(self) -> bool:
        """Whether the filesystem takes direct writes, as far as it has been asked."""
        return self._direct is not None

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def pieces(length: int, writers: int) -> list[tuple[int, int]]:
        """``length`` bytes as up to ``writers`` ranges of whole blocks, none below 1 MiB."""
        step = max(1 << 20, -(-length // writers))
        step = -(-step // BLOCK) * BLOCK
        return [(begin, min(begin + step, length)) for begin in range(0, length, step)]

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of ``view`` at ``offset``; raises ``OSError``."""
        done = 0
        if self._direct is not None and offset % BLOCK == 0:
            done = self._write_direct(view, offset)
        while done < len(view):
            done += os.pwrite(self._buffered, view[done : done + (64 << 20)], offset + done)

    def finish(self) -> None:
        """Cut the padding off and wait until everything is on the disk."""
        os.ftruncate(self._buffered, self._size)
        os.fsync(self._buffered)

    def close(self) -> None:
        while self._opened:
            os.close(self._opened.pop())
        self._bounces.clear()

    def _write_direct(self, view: memoryview, offset: int) -> int:
        """Write what can be written past the page cache; how many bytes from the start that was."""
        whole = len(view) // BLOCK * BLOCK
        aligned = address_of(view) % BLOCK == 0
        done = 0
        while done < whole:
            descriptor = self._direct
            if descriptor is None:
                return done
            try:
                if aligned:
                    written = os.pwrite(
                        descriptor, view[done : min(done + _DIRECT_WRITE, whole)], offset + done
                    )
                else:
                    written = self._write_bounced(
                        descriptor, view[done : min(done + _BOUNCE, whole)], offset + done
                    )
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                self._direct = None  # it stays open until the end: another thread may be in a write
                return done
            done += written
            if written % BLOCK:
                return done  # a short write in the middle of a block: the page cache takes the rest
        return done

    def _write_bounced(self, descriptor: int, view: memoryview, offset: int) -> int:
        with self._lock:
            bounce = self._bounces.pop() if self._bounces else mmap.mmap(-1, _BOUNCE)
        with memoryview(bounce) as whole, whole[: len(view)] as part:
            part[:] = view
            written = os.pwrite(descriptor, part, offset)
        with self._lock:
            self._bounces.append(bounce)
        return written


def address_of(view: memoryview) -> int:
    """Where the bytes of a contiguous view lie; read-only ones too."""
    buffer = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer``, part of its stable interface since 3.11."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _allocate(descriptor: int, size: int) -> bool:
    """Reserve ``size`` bytes; ``False`` where the filesystem cannot (never the slow emulation)."""
    while True:
        if _libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
            return True
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in (errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            return False
        raise OSError(number, os.strerror(number))
