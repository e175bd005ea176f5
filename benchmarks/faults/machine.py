"""The whole engine in one process: the agent serves in a thread, so that its file calls can be watched.

Trainers reach it over its real socket; nothing of the protocol, the slab or the tiers is replaced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from serai.checkpoint.agent import tier as tier_module
from serai.checkpoint.agent.client import canonical_root
from serai.checkpoint.agent.protocol import socket_path
from serai.checkpoint.agent.server import Agent
from serai.checkpoint.agent.tier import Outcome
from serai.storage.base import Storage

__all__ = ["agent_in_thread", "private_runtime"]

Key = tuple[int, int]
_LEAVE_S = 30.0


@contextlib.contextmanager
def private_runtime() -> Iterator[Path]:
    """A socket folder of our own, so that no agent of anybody else is met."""
    folder = Path(tempfile.mkdtemp(prefix="serai-faults-"))
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    try:
        yield folder
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


class _Watched(Agent):
    """Tells of every commit at the moment it returned, before retention goes on."""

    committed: Callable[[Key], None] = staticmethod(lambda key: None)
    leave = False

    def _should_exit(self) -> bool:
        return self.leave or super()._should_exit()

    def _on_outcome(self, outcome: Outcome) -> None:
        if outcome.error is None and outcome.tier == "durable" and not outcome.skipped:
            self.committed(outcome.generation.key)
        super()._on_outcome(outcome)


@contextlib.contextmanager
def agent_in_thread(
    root: Path,
    *,
    committed: Callable[[Key], None] = lambda key: None,
    storage: Storage | None = None,
    first_retry: float = 0.02,
) -> Iterator[Any]:
    """An agent for ``root`` in a thread of this process; ``storage`` takes the place of the root's own.

    ``committed`` is called with the key of every generation right when its commit returned.
    """
    path = socket_path(canonical_root(root))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener.bind(str(path))
    listener.listen(16)
    retries = tier_module._FIRST_RETRY_S, tier_module._LAST_RETRY_S
    tier_module._FIRST_RETRY_S, tier_module._LAST_RETRY_S = first_retry, 4 * first_retry
    agent = _Watched(canonical_root(root), None)
    agent.committed = committed
    if storage is not None:
        agent._root = storage
        for tier in agent._tiers:
            tier.storage = storage
    thread = threading.Thread(target=agent.serve, args=(listener,), daemon=True)
    thread.start()
    try:
        yield agent
    finally:
        agent.stop()
        agent._ledger.end_session()
        agent.leave = True
        thread.join(5)
        for tier in agent._tiers:
            tier.stop()
        limit = time.monotonic() + _LEAVE_S
        while time.monotonic() < limit and not all(tier.idle for tier in agent._tiers):
            time.sleep(0.001)
        for tier in agent._tiers:
            tier._thread.join(5)
        for slot in list(agent._ledger.pool._slots.values()):
            slot.close()
        agent._ledger.pool.close()
        listener.close()
        path.unlink(missing_ok=True)
        tier_module._FIRST_RETRY_S, tier_module._LAST_RETRY_S = retries
