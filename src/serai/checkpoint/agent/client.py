"""The trainer's side: find or start the agent, ask it, hear from it. Every wait has a deadline."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import serai
from serai.checkpoint.agent.protocol import PROTOCOL, Channel, Closed, runtime_folder, socket_path
from serai.errors import CheckpointError, EnvironmentFault
from serai.storage.registry import is_local, open_storage

__all__ = ["AgentClient", "AgentFailed", "canonical_root", "ensure_agent"]

log = logging.getLogger("serai.checkpoint")

START_TIMEOUT_S = 20.0
REQUEST_TIMEOUT_S = 30.0


class AgentFailed(CheckpointError):
    """The agent is gone, or does not answer."""

    default_code = "S424"


def canonical_root(root: str | os.PathLike[str]) -> str:
    """One spelling for one place: a real absolute path for local roots, the URL itself otherwise."""
    text = os.fspath(root)
    if not is_local(text):
        return text.rstrip("/")
    return os.path.realpath(os.path.expanduser(text.removeprefix("file://")))


def ensure_agent(root: str | os.PathLike[str], *, local: str | None = None) -> Path:
    """The socket of this node's agent for ``root``; starts the agent if there is none.

    Raises ``EnvironmentFault`` when it does not come up, with the end of its log, and ``StorageError`` for
    a URL that names no place or holds credentials.
    """
    canonical = canonical_root(root)
    # A URL with credentials in it is refused before it can show in the list of processes or in a log.
    for place in (canonical, *([canonical_root(local)] if local else [])):
        open_storage(place)
    path = socket_path(canonical)
    if _listening(path):
        return path
    log_path = runtime_folder() / f"{path.stem}.log"
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        read_end, write_end = os.pipe()
        try:
            with open(log_path, "ab") as output:
                command = [
                    sys.executable,
                    "-c",
                    f"import sys; sys.path.insert(0, {str(Path(serai.__file__).parent.parent)!r}); "
                    "from serai.checkpoint.agent.server import main; sys.exit(main(sys.argv[1:]))",
                    *("--socket", str(path), "--root", canonical, "--ready", str(write_end)),
                    *(("--local", canonical_root(local)) if local else ()),
                ]
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=(write_end,),
                    cwd="/",
                    env={**os.environ, "PYTHONPATH": _absolute_python_path()},
                )
            os.close(write_end)
            write_end = -1
            _wait_readable(read_end, max(0.1, deadline - time.monotonic()))
        finally:
            os.close(read_end)
            if write_end >= 0:
                os.close(write_end)
        while time.monotonic() < deadline:
            if _listening(path):
                _reap_later(process)
                return path
            if process.poll() is not None:
                break
            time.sleep(0.01)
        if time.monotonic() >= deadline or process.returncode:
            raise EnvironmentFault(
                f"the checkpoint agent for {canonical} did not start (exit code {process.poll()})",
                code="S226",
                where=str(log_path),
                expected=f"a listening agent within {START_TIMEOUT_S:.0f} s; its log ends with: {_tail(log_path)}",
                next_step=f"cat {log_path}",
            )


def _absolute_python_path() -> str:
    return os.pathsep.join(
        os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part
    )


def _reap_later(process: subprocess.Popen[bytes]) -> None:
    """Collect the agent when it exits, so that it is no zombie (and Popen does not complain)."""
    threading.Thread(target=process.wait, name="serai-agent-reaper", daemon=True).start()


def _listening(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(5.0)
            probe.connect(str(path))
            return True
    except OSError:
        return False


def _wait_readable(fd: int, timeout: float) -> None:
    import select

    select.select([fd], [], [], timeout)


def _tail(path: Path, lines: int = 5) -> str:
    try:
        return " | ".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


class AgentClient:
    """A connection to the agent. Thread safe. ``hear`` gets the agent's events (and descriptors, to close), in a background thread."""

    def __init__(self, path: Path, *, hear: Callable[[dict[str, Any], list[int]], None]) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(REQUEST_TIMEOUT_S)
        try:
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            raise AgentFailed(f"cannot reach the checkpoint agent: {error}", where=str(path)) from error
        connection.settimeout(None)
        self._channel = Channel(connection)
        self.pid = self._channel.peer_pid()
        self._hear = hear
        self._lock = threading.Condition()
        self._next = 0
        self._answers: dict[int, tuple[dict[str, Any], list[int]] | None] = {}
        self._dead: str | None = None
        self._thread = threading.Thread(target=self._listen, name="serai-agent-events", daemon=True)
        self._thread.start()

    def hello(self, **fields: Any) -> dict[str, Any]:
        return self.ask("hello", protocol=PROTOCOL, **fields)

    def ask(self, do: str, *, timeout: float = REQUEST_TIMEOUT_S, **fields: Any) -> dict[str, Any]:
        answer, fds = self.ask_with_fds(do, timeout=timeout, **fields)
        for fd in fds:
            os.close(fd)
        return answer

    def ask_with_fds(
        self, do: str, *, timeout: float = REQUEST_TIMEOUT_S, **fields: Any
    ) -> tuple[dict[str, Any], list[int]]:
        """Ask and wait. Raises ``AgentFailed`` after ``timeout`` seconds, or the error the agent answers."""
        with self._lock:
            if self._dead:
                raise AgentFailed(self._dead)
            number = self._next
            self._next += 1
            self._answers[number] = None
        try:
            self._channel.send({"id": number, "do": do, **fields})
        except Closed as error:
            raise AgentFailed(f"the checkpoint agent (pid {self.pid}) is gone") from error
        deadline = time.monotonic() + timeout
        with self._lock:
            while (found := self._answers[number]) is None:
                if self._dead:
                    raise AgentFailed(self._dead)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    del self._answers[number]
                    raise AgentFailed(
                        f"the checkpoint agent (pid {self.pid}) did not answer {do!r} within {timeout:.1f} s",
                        next_step=f"look at it: ps -o stat,wchan,cmd {self.pid}",
                    )
                self._lock.wait(remaining)
            del self._answers[number]
        answer, fds = found
        if "error" in answer:
            told = answer["error"]
            raise CheckpointError(
                told["message"],
                code=told["code"],
                where=told.get("where"),
                expected=told.get("expected"),
                next_step=told.get("next"),
            )
        return answer, fds

    def _listen(self) -> None:
        reason = f"the checkpoint agent (pid {self.pid}) is gone"
        try:
            while True:
                message, fds = self._channel.receive()
                number = message.get("id")
                if number is None:
                    self._hear(message, fds)
                    continue
                with self._lock:
                    if number in self._answers:
                        self._answers[number] = (message, fds)
                        fds = []
                    self._lock.notify_all()
                for fd in fds:  # nobody waits any more
                    os.close(fd)
        except (Closed, ValueError, OSError) as error:
            log.debug("agent connection ended: %s", error)
        with self._lock:
            self._dead = reason
            self._lock.notify_all()

    @property
    def alive(self) -> bool:
        with self._lock:
            return self._dead is None

    def wait_for_end(self, timeout: float) -> bool:
        """Whether the agent is found dead within ``timeout`` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: self._dead is not None, timeout)

    def close(self) -> None:
        self._channel.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
