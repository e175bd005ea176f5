"""Checksums: xxh3-128 of every 16 MiB chunk of a file, so that a part can be verified alone."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

__all__ = ["CHUNK_BYTES", "HASH_NAME", "chunk_count", "chunk_spans", "digest", "hex_digest"]

CHUNK_BYTES = 16 << 20
HASH_NAME = "xxh3-128"


def digest(data: bytes | memoryview | bytearray) -> bytes:
    return xxhash.xxh3_128_digest(data)


def hex_digest(data: bytes | memoryview | bytearray) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def chunk_count(size: int, chunk: int = CHUNK_BYTES) -> int:
    return -(-size // chunk)


def chunk_spans(size: int, chunk: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """``(offset, length)`` of every chunk of a file of ``size`` bytes."""
    for offset in range(0, size, chunk):
        yield offset, min(chunk, size - offset)
