"""What a test needs from the machine: one decorator each, which also says why it skips and what helps.

@needs_root
def test_a_full_disk() -> None: ...
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import cache
from pathlib import Path

import pytest

__all__ = ["needs_azurite", "needs_chromium", "needs_gpu", "needs_root", "needs_slurm"]


def _gpu() -> bool:
    # The driver's file, not torch: a decorator must not import torch when tests are collected.
    return Path("/proc/driver/nvidia/version").exists()


@cache
def azurite() -> Path | None:
    """The program of Azurite (Azure's storage emulator): on the PATH, or where ``make azurite`` puts it."""
    found = shutil.which("azurite-blob")
    if found:
        return Path(found)
    local = Path(__file__).parents[1] / ".cache/azurite/node_modules/.bin/azurite-blob"
    return local if local.exists() and shutil.which("node") else None


needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root (mounts a small tmpfs): sudo make test, or run in a container"
)
needs_slurm = pytest.mark.skipif(
    shutil.which("slurmctld") is None,
    reason="needs Slurm: apt-get install -y --no-install-recommends slurmctld slurmd munge",
)
needs_gpu = pytest.mark.skipif(not _gpu(), reason="needs an NVIDIA GPU and its driver")
needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None or importlib.util.find_spec("playwright") is None,
    reason="needs Chromium: apt-get install -y chromium; pip install playwright",
)
needs_azurite = pytest.mark.skipif(
    azurite() is None, reason="needs Azurite (Azure's emulator): make azurite (needs Node.js and npm)"
)
