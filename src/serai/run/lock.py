"""The run lock: one live supervisor a run, held by the kernel (flock), so that kill -9 leaves nothing stale."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from serai.errors import EnvironmentFault
from serai.run.processes import ProcessIdentity

__all__ = ["LockHolder", "RunLock"]

_UNSUPPORTED = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


@dataclass(frozen=True)
class LockHolder:
    """Who holds (or last held) a run lock, as written into it. ``since`` is unix seconds."""

    pid: int
    host: str
    since: float
    identity: str

    @classmethod
    def read(cls, path: Path) -> LockHolder | None:
        try:
            document: dict[str, Any] = json.loads(path.read_text())
            return cls(
                pid=int(document["pid"]),
                host=str(document["host"]),
                since=float(document["since"]),
                identity=str(document["identity"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def alive_here(self) -> bool:
        """Whether that very process (not a later one with its number) lives on this host."""
        return self.host == socket.gethostname() and ProcessIdentity(self.pid, self.identity).alive()


class RunLock:
    """An exclusive lock on one run.

    ``kernel`` says whether the kernel guards it. On a file system without flock (some NFS mounts) the
    recorded pid and host stand in, which cannot see a supervisor that lives on another host; ``note``
    then says so in words for the console.
    """

    def __init__(self, path: Path, *, name: str) -> None:
        self._path = path
        self._name = name
        self._fd = -1
        self.kernel = True
        self.note: str | None = None

    def acquire(self) -> RunLock:
        """Take the lock at once or raise ``EnvironmentFault`` S502 that names the live holder."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock(fd)
            holder = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": time.time(),
                "identity": ProcessIdentity.of(os.getpid()).started,
            }
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(holder).encode() + b"\n", 0)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return self

    def _lock(self, fd: int) -> None:
        holder = LockHolder.read(self._path)
        try:
            # Somebody who only looks (``held``) has it for an instant: that is no live supervisor.
            for pause in (0.02, 0.05, 0.1, 0.2, None):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except BlockingIOError:
                    if pause is None:
                        raise
                    time.sleep(pause)
        except BlockingIOError:
            raise _live(self._name, LockHolder.read(self._path) or holder) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            if holder is not None and holder.alive_here():
                raise _live(self._name, holder) from None
            self.kernel = False
            self.note = (
                f"{self._path.parent} is on a file system without flock: a second supervisor of this run on "
                "another host would not be noticed; keep the workspace on a file system with locks"
            )

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @staticmethod
    def held(path: Path) -> LockHolder | None:
        """The live holder of a lock, or ``None`` when nobody holds it."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return LockHolder.read(path) or LockHolder(pid=0, host="?", since=0.0, identity="")
        except OSError:
            holder = LockHolder.read(path)
            return holder if holder is not None and holder.alive_here() else None
        else:
            return None
        finally:
            os.close(fd)

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _live(name: str, holder: LockHolder | None) -> EnvironmentFault:
    who = (
        f"process {holder.pid} on {holder.host}, since {time.strftime('%H:%M:%S', time.localtime(holder.since))}"
        if holder is not None
        else "another process"
    )
    return EnvironmentFault(
        f"run {name!r} is running already ({who})",
        code="S502",
        expected="one supervisor a run at a time",
        next_step=f"serai logs {name}   (or: serai stop {name}; or give this job another name)",
    )
