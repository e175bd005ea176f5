"""A prepared pack, opened: verified shards and plans of both splits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serai.data.packing import PackPlan, Rows
from serai.data.shards import FileRecord, TokenShards, verify_file
from serai.errors import StorageError

__all__ = ["Pack", "open_pack"]


@dataclass(frozen=True)
class Pack:
    """Both splits of a job's data.

    Attributes:
        tokenizer: name of the tokenizer's folder in the cache's ``tokenizers/``.
        fingerprint: identifies text, split, tokenizer and plan.
    """

    folder: Path
    manifest: dict[str, Any]
    train: Rows
    validation: Rows

    @property
    def fingerprint(self) -> str:
        return str(self.manifest["fingerprint"])

    @property
    def tokenizer(self) -> str:
        return str(self.manifest["tokenizer"]["key"])

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["vocab_size"])

    @property
    def seq_len(self) -> int:
        return int(self.manifest["seq_len"])


def open_pack(manifest: Path, *, verify: bool = True) -> Pack:
    """Open a pack by the path of its ``manifest.json``; every file is hashed first.

    Raises:
        StorageError: there is none (S331), or a file is not what was written (S330).
    """
    folder = manifest.parent
    try:
        document = json.loads(manifest.read_text())
    except (OSError, ValueError) as error:
        raise StorageError(
            "there are no prepared data here",
            code="S331",
            where=str(manifest),
            expected="the manifest.json that preparation writes",
            next_step="run the job again: `serai run` prepares what is missing",
        ) from error
    dtype = np.dtype(document["dtype"])
    rows = {}
    for name in ("train", "validation"):
        records = [FileRecord.from_json(record) for record in document["splits"][name]["files"]]
        if verify:
            for record in records:
                verify_file(folder / name, record)
        plan = PackPlan.load(folder / name, seq_len=document["seq_len"])
        rows[name] = Rows(plan, TokenShards(folder / name, records, dtype=dtype))
    return Pack(folder=folder, manifest=document, **rows)
