"""Which URL opens what."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serai.errors import StorageError
from serai.storage import open_storage
from serai.storage.local import LocalStorage
from serai.storage.registry import is_local


def opened(url: str | Path) -> Path:
    storage = open_storage(url)
    assert isinstance(storage, LocalStorage)
    return storage.path


def test_paths_and_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert opened(tmp_path / "a") == tmp_path / "a"
    assert opened("relative/dir") == tmp_path / "relative/dir"
    assert opened("~/runs") == tmp_path / "home/runs"
    assert opened(f"file://{tmp_path}/with%20space") == tmp_path / "with space"
    assert opened("odd://"[:3] + "/x") == tmp_path / "odd/x"
    assert open_storage(tmp_path / "a b").url == f"file://{tmp_path}/a%20b"
    assert opened(open_storage(tmp_path / "a b").url) == tmp_path / "a b"
    assert os.listdir(tmp_path) == []  # opening makes nothing


def test_unknown_schemes_name_the_known_ones() -> None:
    for url in ("hdfs://x/y", "S4://bucket", "https://user:secret@host/x"):
        with pytest.raises(StorageError) as caught:
            open_storage(url)
        assert caught.value.code == "S308"
        assert "s3://" in str(caught.value)
        assert "secret" not in str(caught.value)
    with pytest.raises(StorageError, match="not of 'host'"):
        open_storage("file://host/x")


def test_what_is_local() -> None:
    assert is_local("a/b")
    assert is_local("file:///a")
    assert not is_local("s3://bucket/a")
