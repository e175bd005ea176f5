"""Which class keeps which kind of URL. The classes are imported when used."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from serai.errors import StorageError
from serai.storage.base import Storage

__all__ = ["SCHEMES", "is_local", "open_storage"]

SCHEMES = {
    "file": "serai.storage.local.LocalStorage",
    "s3": "serai.storage.object.ObjectStorage",
    "az": "serai.storage.object.ObjectStorage",
    "gs": "serai.storage.object.ObjectStorage",
}
"""Scheme → dotted class. A new kind of storage is one file and one line here."""


def open_storage(url: str | Path, **options: Any) -> Storage:
    """The storage that ``url`` names; nothing is read or written yet.

    Args:
        url: a path (``~`` is expanded), ``file:///path``, ``s3://bucket/prefix``,
            ``az://container/prefix`` or ``gs://bucket/prefix``. A query may hold options:
            ``s3://bucket/run?endpoint=http://host:9000&region=eu-west-1``.
        options: keyword arguments of the class, above those in the query.

    Raises:
        StorageError: an unknown scheme (S308), or a URL without a bucket (S309).
    """
    text = str(url)
    scheme = _scheme(text)
    if scheme not in SCHEMES:
        raise StorageError(
            f"nothing here keeps {scheme}:// storage",
            code="S308",
            where=f"{scheme}://…",
            expected=f"a path, or one of {', '.join(f'{known}://' for known in SCHEMES)}",
            next_step="serai explain S308",
        )
    module, _, name = SCHEMES[scheme].rpartition(".")
    kind = getattr(import_module(module), name)
    storage: Storage = kind(_file_path(text) if scheme == "file" else text, **options)
    return storage


def is_local(url: str | Path) -> bool:
    """Whether ``url`` is a folder of this machine."""
    return _scheme(str(url)) == "file"


def _scheme(text: str) -> str:
    scheme, found, _ = text.partition("://")
    return scheme.lower() if found and "/" not in scheme else "file"


def _file_path(text: str) -> str:
    if _scheme(text) == "file" and text[:7].lower() == "file://":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise StorageError(
                f"file:// names a folder of this machine, not of {parts.netloc!r}",
                code="S308",
                where=text,
                expected="three slashes: file:///path",
                next_step=f"file:///{parts.netloc}{parts.path}",
            )
        return unquote(parts.path)
    return text
