"""Bytes behind a URL: ranges, put, put-if-absent, list, delete (local disk and object stores)."""
