"""A URL → byte ranges, put, put-if-absent, list, delete. ``open_storage`` is the door."""

from __future__ import annotations

from serai.storage.base import Entry, Storage
from serai.storage.registry import open_storage

__all__ = ["Entry", "Storage", "open_storage"]
