"""Agents of tests live in a folder of their own and never outlive the test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    import torch


@pytest.fixture(autouse=True)
def private_agents(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    for process in agents(folder):
        os.kill(process.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A root that two processes saved to, made once (it takes seconds), and the whole tensors."""
    from tests.checkpoint.samples import save_two_ranks

    folder = tmp_path_factory.mktemp("two-ranks-run")
    folder.chmod(0o700)
    root = tmp_path_factory.mktemp("two-ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        expected = save_two_ranks(root)
    for process in agents(folder):
        os.kill(process.pid, signal.SIGKILL)
    return root, expected


def agents(folder: Path) -> list[psutil.Process]:
    """The live agents whose sockets are in ``folder``."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if (
            any(str(folder) in part for part in command)
            and "--ready" in command
            and process.info["status"] != "zombie"
        ):
            found.append(process)
    return found
