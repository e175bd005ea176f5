"""The rules of keys, one place for every kind of storage."""

from __future__ import annotations

from serai.errors import StorageError

__all__ = ["TEMPORARY", "check_folder", "check_key", "check_prefix"]

TEMPORARY = ".serai-tmp-"
"""Names that start so are unfinished work: never an object, never listed, swept when old."""


def check_key(key: str) -> str:
    """``key`` itself when it is one: relative, ``/``-separated, never leaving its root."""
    if not key:
        raise _bad_key(key, "it is empty")
    _check_parts(key, key.split("/"))
    return key


def check_folder(prefix: str) -> str:
    """``prefix`` itself when it names a folder: ``a/`` or ``a/b/``."""
    if not prefix.endswith("/"):
        raise _bad_key(prefix, "a folder ends with '/'")
    _check_parts(prefix, prefix[:-1].split("/"))
    return prefix


def check_prefix(prefix: str) -> str:
    """``prefix`` itself when it may start a key; the last part may be unfinished or empty."""
    if prefix:
        *folders, last = prefix.split("/")
        _check_parts(prefix, [*folders, last] if last else folders)
    return prefix


def _check_parts(key: str, parts: list[str]) -> None:
    for part in parts:
        if part == "":
            raise _bad_key(key, "it has an empty part (a leading, trailing or doubled '/')")
        if part in (".", ".."):
            raise _bad_key(key, f"it has the part {part!r}")
        if part.startswith(TEMPORARY):
            raise _bad_key(key, f"names that start with {TEMPORARY!r} are kept for unfinished work")
        if "\0" in part or "\\" in part:
            raise _bad_key(key, "it has a NUL or a backslash")


def _bad_key(key: str, reason: str) -> StorageError:
    return StorageError(
        f"{key!r} is no storage key: {reason}",
        code="S305",
        where=repr(key),
        expected="a relative name such as 'step-00000100/manifest.json'",
        next_step="serai explain S305",
    )
