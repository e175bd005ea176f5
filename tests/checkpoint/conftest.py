"""Agents of tests live in a folder of their own and never outlive the test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest


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
