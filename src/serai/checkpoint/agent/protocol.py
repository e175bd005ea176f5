"""Messages between trainer and agent: length-prefixed JSON on a private Unix socket, with descriptors."""

from __future__ import annotations

import array
import hashlib
import json
import os
import socket
import stat
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serai.errors import CheckpointError, EnvironmentFault

__all__ = ["PROTOCOL", "Channel", "Closed", "runtime_folder", "socket_path"]

PROTOCOL = 1
MAX_MESSAGE = 1 << 30
_LENGTH = struct.Struct("<I")
_MAX_FDS = 64
# Linux refuses socket paths of more than 107 bytes.
_KEY_LENGTH = 20


class Closed(CheckpointError):
    """The other side is gone."""

    default_code = "S420"


class Channel:
    """One connection. ``send`` may be called from several threads, ``receive`` from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()

    def limit_sending(self, seconds: int) -> None:
        """Give up (``Closed``) when the other side has not read for that long; receiving is not limited."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

    def peer_pid(self) -> int:
        pid, _, _ = struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Raises ``Closed`` when the other side is gone."""
        body = json.dumps(message, separators=(",", ":")).encode("utf-8", "surrogatepass")
        data = _LENGTH.pack(len(body)) + body
        with self._sending:
            try:
                if fds:
                    packed = array.array("i", fds)
                    sent = self._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])
                else:
                    sent = self._socket.send(data)
                if sent < len(data):
                    self._socket.sendall(memoryview(data)[sent:])
            except OSError as error:
                raise Closed(f"the other side of the checkpoint socket is gone: {error}") from error

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next message and the descriptors that came with it (the caller closes them)."""
        fds: list[int] = []
        head = self._read(_LENGTH.size, fds)
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE:
            raise Closed("the other side of the checkpoint socket speaks another language")
        message = json.loads(self._read(length, fds))
        if not isinstance(message, dict):
            raise Closed("the other side of the checkpoint socket sent no message")
        return message, fds

    def _read(self, count: int, fds: list[int]) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                data, received, _, _ = socket.recv_fds(
                    self._socket, min(count - len(parts), 1 << 20), _MAX_FDS, socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                raise Closed(f"the checkpoint socket broke: {error}") from error
            fds.extend(received)
            if not data:
                raise Closed("the other side of the checkpoint socket is gone")
            parts += data
        return bytes(parts)

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()


def runtime_folder() -> Path:
    """A folder for sockets that only this user can enter. Raises ``EnvironmentFault`` if it is not."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK) and os.stat(base).st_uid == os.getuid():
        folder = Path(base) / "serai"
    else:
        folder = Path("/tmp") / f"serai-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise EnvironmentFault(
            f"{folder} does not belong to this user",
            code="S225",
            where=str(folder),
            expected=f"a folder owned by user {os.getuid()} with mode 0700",
            next_step=f"remove {folder}, or set XDG_RUNTIME_DIR to a folder of your own",
        )
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def socket_path(root: str) -> Path:
    """The socket of the agent that keeps ``root`` (canonical) on this node for this user."""
    key = hashlib.sha256(root.encode("utf-8", "surrogatepass")).hexdigest()[:_KEY_LENGTH]
    return runtime_folder() / f"{key}.sock"
