"""The places that the contract is tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from serai.storage import Storage, open_storage


@pytest.fixture(params=["local"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty storage of each kind."""
    return open_storage(tmp_path / "root")
