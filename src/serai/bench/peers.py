"""Other ways to save the same state, each asked the same questions: how long it blocks, when it is on disk."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import serai
from serai.checkpoint.agent.client import AgentClient, ensure_agent
from serai.errors import EnvironmentFault

__all__ = ["PEERS", "Peer", "flush", "make_peer"]


class Peer(ABC):
    """One way to save. ``save`` returns when training may go on, ``finish`` when the bytes are durable."""

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        self.folder = folder
        self.state = state

    @abstractmethod
    def save(self, step: int) -> None: ...

    @abstractmethod
    def finish(self) -> None: ...

    @abstractmethod
    def load(self) -> None:
        """Read the newest save back into ``state``, in place where the way allows it."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Let go of helpers."""


def flush(folder: Path) -> None:
    """fsync every file below, as a power cut would not wait for the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


class Serai(Peer):
    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        super().__init__(folder, state)
        self.checkpointer = serai.Checkpointer(folder)
        self.checkpointer.restore(state)  # nothing is there yet: slots are pre-faulted meanwhile
        self._handle: Any = None

    def warm_up(self, timeout: float = 120.0) -> None:
        """Wait until the slots that ``restore`` asked for are faulted in, as the first steps would."""
        client = AgentClient(ensure_agent(self.folder), hear=lambda message, fds: None)
        deadline = time.monotonic() + timeout
        try:
            while time.monotonic() < deadline and not client.ask("status")["prefaulted"]:
                time.sleep(0.05)
        finally:
            client.close()

    def save(self, step: int) -> None:
        self._handle = self.checkpointer.save(step, self.state)

    def finish(self) -> None:
        self._handle.wait("durable", 600)

    def load(self) -> None:
        if self.checkpointer.restore(self.state) is None:
            raise EnvironmentFault("nothing was restored", code="S200")

    def close(self) -> None:
        self.checkpointer.close()


class TorchSave(Peer):
    def save(self, step: int) -> None:
        torch.save(self.state, self.folder / "state.pt")

    def finish(self) -> None:
        flush(self.folder)

    def load(self) -> None:
        loaded = torch.load(self.folder / "state.pt", weights_only=True)
        for name, tensor in self.state["tensors"].items():
            tensor.copy_(loaded["tensors"][name])


def _dcp() -> Any:
    return import_module("torch.distributed.checkpoint")


class DCP(Peer):
    def _path(self, step: int) -> str:
        return str(self.folder / f"step-{step}")

    def save(self, step: int) -> None:
        self._newest = self._path(step)
        _dcp().save(self.state, checkpoint_id=self._newest, no_dist=True)

    def finish(self) -> None:
        flush(self.folder)

    def load(self) -> None:
        _dcp().load(self.state, checkpoint_id=self._newest, no_dist=True)


class DCPAsync(DCP):
    """``async_save`` with its default thread. It needs a process group."""

    kind = "THREAD"

    def save(self, step: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self._newest = self._path(step)
        self._future = _dcp().async_save(
            self.state, checkpoint_id=self._newest, async_checkpointer_type=AsyncCheckpointerType[self.kind]
        )

    def finish(self) -> None:
        self._future.result()
        flush(self.folder)


class DCPAsyncProcess(DCPAsync):
    kind = "PROCESS"


class TorchSnapshot(Peer):
    def save(self, step: int) -> None:
        snapshot = import_module("torchsnapshot").Snapshot
        self._path = str(self.folder / f"step-{step}")
        self._pending = snapshot.async_take(self._path, {"state": _Holder(self.state["tensors"])})

    def finish(self) -> None:
        self._pending.wait()
        flush(self.folder)

    def load(self) -> None:
        snapshot = import_module("torchsnapshot").Snapshot
        snapshot(self._path).restore({"state": _Holder(self.state["tensors"])})


class _Holder:
    """What torchsnapshot takes: an object with ``state_dict``."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in state.items():
            if tensor is not self.tensors[name]:
                self.tensors[name].copy_(tensor)


PEERS: dict[str, tuple[type[Peer], str | None]] = {
    "serai": (Serai, None),
    "torch.save": (TorchSave, None),
    "DCP save": (DCP, None),
    "DCP async_save (thread)": (DCPAsync, None),
    "DCP async_save (process)": (DCPAsyncProcess, None),
    "torchsnapshot": (TorchSnapshot, "torchsnapshot"),
}
"""Name → (class, package it needs beside torch)."""


def make_peer(name: str) -> Callable[[Path, dict[str, Any]], Peer] | str:
    """How to make a peer, or why it cannot take part here."""
    kind, package = PEERS[name]
    if package is not None:
        try:
            import_module(package)
        except Exception as error:
            return (
                f"{package} does not import here: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
            )
    return kind
