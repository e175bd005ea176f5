"""Whether a live run on this node uses a root: writing into it by hand would take the run's place."""

from __future__ import annotations

import contextlib

from serai.checkpoint.agent.client import AgentClient, canonical_root
from serai.checkpoint.agent.protocol import socket_path
from serai.errors import CheckpointError, SeraiError
from serai.storage.base import Storage
from serai.storage.local import LocalStorage

__all__ = ["refuse_live_run"]


def refuse_live_run(storage: Storage, action: str) -> None:
    """Raises ``CheckpointError`` S435 when trainers on this node save to the root."""
    root = str(storage.path) if isinstance(storage, LocalStorage) else storage.url
    path = socket_path(canonical_root(root))
    if not path.exists():
        return
    trainers: list[int] = []
    with contextlib.suppress(SeraiError):  # nobody listens: an agent that was killed
        client = AgentClient(path, hear=lambda message, fds: None)
        try:
            trainers = client.ask("status", timeout=5.0)["trainers"]
        finally:
            client.close()
    if trainers:
        raise CheckpointError(
            f"a live run saves to {storage.url} (pid {', '.join(map(str, trainers))}), and {action} would stop it",
            code="S435",
            where=storage.url,
            expected="a root that no run uses now",
            next_step="stop the run first, or give another root",
        )
