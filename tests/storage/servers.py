"""Real servers for storage tests, each on a free port of this machine, and a proxy that breaks things."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["FaultyProxy", "free_port", "moto_server", "wait_for_port"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], *, seconds: float = 60) -> None:
    """Return once something listens; fail when the process ends or the time is over."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args} ended with {process.returncode} before it listened")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        threading.Event().wait(0.05)
    raise TimeoutError(f"{process.args} did not listen on port {port} within {seconds} s")


@contextlib.contextmanager
def running(command: list[str | Path], port: int) -> Iterator[int]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port, process)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


@contextlib.contextmanager
def moto_server() -> Iterator[int]:
    """An S3 server with S3's own semantics (conditional puts, multipart); the port it listens on."""
    port = free_port()
    with running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        yield port


@contextlib.contextmanager
def azurite_server(program: Path, folder: Path) -> Iterator[int]:
    """Azure's own storage emulator."""
    port = free_port()
    command: list[str | Path] = [program, "--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort"]
    command += [str(port), "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with running(command, port):
        yield port


class FaultyProxy:
    """Stands in front of a store and answers the next requests with what ``plan`` says.

    Faults: a status (``"500"``, ``"503"``, ``"429"``), ``"reset"`` (connection reset, nothing done),
    ``"lost"`` (the request is done, its answer is not delivered), ``"hang"`` (no answer until the proxy
    stops), ``"short"`` (half of the body, then the end). ``always`` is the fault of every request once
    the plan is used up. ``seen`` holds (method, path, fault) of each request.
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.seen: list[tuple[str, str, str | None]] = []
        self.always: str | None = None
        self.stopping = threading.Event()
        self._plan: deque[tuple[str, str | None]] = deque()
        self._lock = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.handle(self)

            def log_message(self, *_: Any) -> None: ...

        for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
            setattr(Handler, f"do_{method}", Handler.handle_any)

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_: Any) -> None: ...  # a client that went away is the point here

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def plan(self, *faults: str, method: str | None = None) -> None:
        """The next requests (of ``method``, where given) fail so, one after the other."""
        with self._lock:
            self._plan.extend((fault, method) for fault in faults)

    @property
    def left(self) -> int:
        """How many planned faults have not happened."""
        return len(self._plan)

    def _next(self, method: str) -> str | None:
        with self._lock:
            if self._plan:
                fault, wanted = self._plan[0]
                if wanted in (None, method):
                    self._plan.popleft()
                    return fault
                return None
            return self.always

    def handle(self, request: http.server.BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("Content-Length") or 0)
        body = request.rfile.read(length)
        fault = self._next(request.command)
        self.seen.append((request.command, request.path, fault))
        if fault == "hang":
            self.stopping.wait(60)
            request.close_connection = True
        elif fault == "reset":
            self._reset(request)
        elif fault is not None and fault.isdigit():
            document = b"<Error><Code>Faulty</Code><Message>on purpose</Message></Error>"
            request.send_response(int(fault))
            request.send_header("Content-Length", str(len(document)))
            request.end_headers()
            if request.command != "HEAD":
                request.wfile.write(document)
        else:
            self._forward(request, body, fault)

    def _forward(self, request: http.server.BaseHTTPRequestHandler, body: bytes, fault: str | None) -> None:
        upstream = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=30)
        try:
            upstream.request(request.command, request.path, body, dict(request.headers))
            answer = upstream.getresponse()
            content = answer.read()
        finally:
            upstream.close()
        if fault == "lost":
            self._reset(request)
            return
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                request.send_header(name, value)
        size = answer.getheader("Content-Length") if request.command == "HEAD" else str(len(content))
        request.send_header("Content-Length", size or "0")
        request.end_headers()
        if fault == "short":
            request.wfile.write(content[: len(content) // 2])
            request.close_connection = True
        else:
            request.wfile.write(content)

    @staticmethod
    def _reset(request: http.server.BaseHTTPRequestHandler) -> None:
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.close_connection = True
        request.connection.close()
