"""The preparation cache: built once, whatever number of processes ask, and never seen half-built.

A build happens in a temporary folder under a file lock and becomes visible by one ``rename``, after its
files are on disk. A process killed at any moment leaves only a temporary folder, which the next holder
of the lock removes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from serai.errors import EnvironmentFault, StorageDenied, StorageError, StorageFull

__all__ = ["LOCK_TIMEOUT_S", "build_once", "locked", "write_atomically"]

LOCK_TIMEOUT_S = 1800.0
"""How long a process waits for another one that prepares the same thing (seconds)."""

_POLL_S = 0.05


@contextmanager
def locked(path: Path, *, timeout: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (created if missing); the kernel frees it when the holder dies.

    Raises:
        EnvironmentFault: another process held it for ``timeout`` seconds.
    """
    with _as_storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise EnvironmentFault(
                        f"another process has been preparing the same data for {timeout:.0f} s",
                        code="S223",
                        where=str(path),
                        expected="the lock to be freed when that process has finished or died",
                        next_step=f"see who holds it with `fuser -v {path}`, then run again",
                    ) from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def build_once(
    target: Path,
    build: Callable[[Path], None],
    *,
    valid: Callable[[Path], bool],
    timeout: float = LOCK_TIMEOUT_S,
) -> bool:
    """Make sure that the folder ``target`` exists and is valid; returns whether it had to be built.

    Args:
        build: fills the empty folder it is given.
        valid: tells whether an existing folder can be used; one that cannot is replaced.
    """
    if target.is_dir() and valid(target):
        return False
    with locked(target.parent / f".{target.name}.lock", timeout=timeout):
        if target.is_dir():
            if valid(target):
                return False
            shutil.rmtree(target)
        prefix = f".building-{target.name}-"
        for leftover in target.parent.glob(prefix + "*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with _as_storage_errors(target):
            building = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
            try:
                build(building)
                for path in sorted(building.rglob("*")):
                    _sync(path)
                _sync(building)
                building.chmod(0o755)
                building.rename(target)
                _sync(target.parent)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
    return True


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``: readers see the old bytes or the new ones, also after a power cut."""
    with _as_storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _as_storage_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says about the cache folder into who must act."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"no space left while preparing data ({error.strerror})",
                where=str(path),
                expected="room for the text, its tokens and the tokenizer",
                next_step="free space there, or choose another place with --workspace",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StorageDenied(
                f"the data cache cannot be written ({error.strerror})",
                where=str(error.filename or path),
                expected="a folder that this user may write",
                next_step="choose another place with --workspace, or change the folder's permissions",
            ) from error
        raise StorageError(
            f"the data cache failed: {error.strerror or error}", where=str(error.filename or path)
        ) from error
