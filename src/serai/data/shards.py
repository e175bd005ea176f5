"""Token shards: the tokens of one split as memory-mapped files with a hashed table of what is in them.

A split folder holds ``tokens-00000.bin`` … (little-endian unsigned integers, documents back to back),
``documents.npy`` (``[documents, 3] int64``: shard, first token, tokens) and is described by an entry of the
pack's ``manifest.json``. A document never lies in two shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from serai.errors import StorageError

__all__ = ["FileRecord", "TokenShards", "describe_file", "token_type", "verify_file", "write_shards"]

SHARD_TOKENS = 1 << 27
"""Tokens after which a new shard file is begun (256 MiB at two bytes a token)."""

_BLOCK = 8 << 20


@dataclass(frozen=True)
class FileRecord:
    """A file of a pack: its name in the folder, size in bytes, and the two hashes of its bytes.

    xxh3 is checked whenever the file is opened; sha256 identifies the content to others.
    """

    name: str
    size: int
    xxh3: str
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "size": self.size, "xxh3_128": self.xxh3, "sha256": self.sha256}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> FileRecord:
        return cls(record["name"], record["size"], record["xxh3_128"], record["sha256"])


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type that holds every token: ``uint16`` up to 65,536 entries, else ``uint32``."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_shards(
    folder: Path,
    documents: Iterable[NDArray[np.uint32]],
    *,
    dtype: np.dtype[Any],
    shard_tokens: int = SHARD_TOKENS,
) -> list[FileRecord]:
    """Write documents (each ``[tokens] uint32``) in order; returns the records of the files written."""
    table: list[tuple[int, int, int]] = []
    names: list[str] = []
    stream = None
    filled = 0
    try:
        for tokens in documents:
            if stream is None or (filled and filled + len(tokens) > shard_tokens):
                if stream is not None:
                    stream.close()
                names.append(f"tokens-{len(names):05d}.bin")
                stream = (folder / names[-1]).open("wb")
                filled = 0
            table.append((len(names) - 1, filled, len(tokens)))
            stream.write(tokens.astype(dtype).tobytes())
            filled += len(tokens)
    finally:
        if stream is not None:
            stream.close()
    np.save(folder / "documents.npy", np.array(table, dtype=np.int64).reshape(-1, 3))
    return [describe_file(folder, name) for name in [*names, "documents.npy"]]


def describe_file(folder: Path, name: str) -> FileRecord:
    """Hash a file that has just been written."""
    xxh3, sha256, size = xxhash.xxh3_128(), hashlib.sha256(), 0
    with (folder / name).open("rb") as stream:
        while block := stream.read(_BLOCK):
            xxh3.update(block)
            sha256.update(block)
            size += len(block)
    return FileRecord(name, size, xxh3.hexdigest(), sha256.hexdigest())


def verify_file(folder: Path, record: FileRecord) -> None:
    """Raise ``StorageError`` (S330) unless the file's size and xxh3 are those of its record."""
    path = folder / record.name
    try:
        size = path.stat().st_size
        xxh3 = xxhash.xxh3_128()
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                xxh3.update(block)
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})", record) from error
    if size != record.size:
        raise _damaged(path, f"has {size} bytes", record)
    if xxh3.hexdigest() != record.xxh3:
        raise _damaged(path, f"has the hash {xxh3.hexdigest()}", record)


def _damaged(path: Path, what: str, record: FileRecord) -> StorageError:
    return StorageError(
        f"prepared data are damaged: {path.name} {what}",
        code="S330",
        where=str(path),
        expected=f"{record.size} bytes with xxh3 {record.xxh3}",
        next_step="run the job again: preparation replaces what does not verify",
    )


class TokenShards:
    """Read access to the shards of one split; nothing is loaded before it is asked for."""

    def __init__(self, folder: Path, records: list[FileRecord], *, dtype: np.dtype[Any]) -> None:
        self.documents: NDArray[np.int64] = np.load(folder / "documents.npy", allow_pickle=False)
        names = sorted(record.name for record in records if record.name.startswith("tokens-"))
        self._shards = [np.memmap(folder / name, dtype=dtype, mode="r") for name in names]

    @property
    def tokens(self) -> int:
        """Tokens in all documents."""
        return int(self.documents[:, 2].sum())

    def read(self, document: int, start: int, length: int) -> NDArray[Any]:
        """``length`` tokens of a document from its token ``start`` on: a view, ``[length]``."""
        shard, first, size = (int(value) for value in self.documents[document])
        if not 0 <= start <= start + length <= size:
            raise IndexError(f"document {document} has {size} tokens, asked for {start}..{start + length}")
        return self._shards[shard][first + start : first + start + length]

    def counts(self, vocab_size: int) -> NDArray[np.int64]:
        """How often each token occurs: ``[vocab_size] int64``."""
        total = np.zeros(vocab_size, dtype=np.int64)
        for shard in self._shards:
            for start in range(0, len(shard), _BLOCK):
                total += np.bincount(shard[start : start + _BLOCK], minlength=vocab_size)
        return total
