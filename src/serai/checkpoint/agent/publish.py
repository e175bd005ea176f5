"""Making a generation visible: attempts, records, the manifest, the hint, retention.

The manifest is written last and exclusively, after every shard is durable. A higher attempt in the root
means that another run has taken over: then nothing more is committed.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import time
from typing import Any

from serai.checkpoint.catalog import LATEST, Generation, generations, is_pinned
from serai.checkpoint.format import (
    DTYPES,
    MANIFEST,
    VALUES,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
)
from serai.checkpoint.hashing import hex_digest
from serai.checkpoint.history import append_history
from serai.checkpoint.layout import Box
from serai.checkpoint.policy import Candidate, Keep, retained
from serai.errors import NotFoundInStorage, SaveFailed, StorageError
from serai.storage.base import Storage
from serai.storage.local import LocalStorage

__all__ = [
    "build_manifest",
    "claim_attempt",
    "claimed_attempts",
    "commit",
    "record_name",
    "remove_generation",
    "retain",
    "superseded_by",
    "unfinished",
]

RECORDS = "records/"


def claim_attempt(storage: Storage, session: str) -> int:
    """Take the next attempt number, exclusively among all machines that use this root."""
    if not isinstance(storage, LocalStorage) and not storage.probe_conditional_put():
        raise SaveFailed(
            "this store ignores put-if-absent, so two runs could overwrite each other's checkpoints",
            code="S428",
            where=storage.url,
            expected="a store that honours If-None-Match (S3, Azure Blob, Google Cloud Storage, Ceph do)",
            next_step="use another store, or a folder",
        )
    for _ in range(1000):
        # A root that was copied without attempts/ still holds generations of earlier attempts.
        committed = (generation.attempt for generation in generations(storage))
        attempt = max(*claimed_attempts(storage), *committed, 0, 0) + 1
        note = {"session": session, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        if storage.put_if_absent(f"attempts/{attempt:06d}", json.dumps(note).encode()):
            return attempt
    raise SaveFailed("could not claim an attempt: others took every number", code="S411", where=storage.url)


def claimed_attempts(storage: Storage) -> list[int]:
    """The attempt numbers that runs have taken in this root."""
    numbers = []
    for entry in storage.list("attempts/"):
        tail = entry.key.rpartition("/")[2]
        if tail.isdigit():
            numbers.append(int(tail))
    return numbers


def superseded_by(storage: Storage, attempt: int) -> int | None:
    """A higher attempt than ours, if one was claimed."""
    highest = max(claimed_attempts(storage), default=0)
    return highest if highest > attempt else None


def record_name(rank: int) -> str:
    return f"{RECORDS}rank-{rank:05d}.json"


def build_manifest(
    *,
    run: str,
    step: int,
    key: tuple[int, int],
    created: float,
    world_size: int,
    records: dict[int, dict[str, Any]],
) -> tuple[Manifest, bytes]:
    """The manifest and ``values.json`` of a generation, from every rank's record.

    A record holds ``table`` (pieces), ``trees``, ``probes``, ``files``, ``metrics`` and
    ``software``. Raises ``SaveFailed`` when ranks hold different bytes of what was saved as replicated.
    """
    _compare_replicas(records)
    order = sorted(records)
    files: list[FileEntry] = []
    rows: dict[str, dict[str, Any]] = {}
    pieces: dict[str, list[Piece]] = {}
    for rank in order:
        first_file = len(files)
        files += [FileEntry(f["name"], f["size"], tuple(f["chunks"])) for f in records[rank]["files"]]
        for row in records[rank]["table"]:
            rows.setdefault(row["name"], row)
            box = Box(tuple(row["offsets"]), tuple(row["lengths"]))
            pieces.setdefault(row["name"], []).append(Piece(first_file + row["file"], row["start"], box))
    tensors = {
        name: TensorEntry(
            name,
            tuple(row["path"]),
            DTYPES[row["dtype"]],
            tuple(row["shape"]),
            tuple(sorted(pieces[name], key=lambda piece: piece.box)),
            row.get("rank"),
            row.get("detail"),
        )
        for name, row in rows.items()
    }
    values = _values(records, order)
    first = records[order[0]]
    manifest = Manifest(
        run=run,
        step=step,
        attempt=key[0],
        sequence=key[1],
        created=created,
        world_size=world_size,
        files=tuple(files),
        tensors=tensors,
        values_size=len(values),
        values_digest=hex_digest(values),
        software=first["software"],
        metrics=first["metrics"],
    )
    return manifest, values


def _values(records: dict[int, dict[str, Any]], order: list[int]) -> bytes:
    """``values.json``: per top-level name one tree where all ranks agree, else one a rank."""
    names: dict[str, None] = {}
    for rank in order:
        names.update(dict.fromkeys(records[rank]["trees"]))
    document: dict[str, Any] = {}
    for name in names:
        trees = [records[rank]["trees"].get(name) for rank in order]
        same = all(tree == trees[0] for tree in trees[1:])
        document[name] = {"same": trees[0]} if same else {"ranks": trees}
    return json.dumps({"schema_version": 1, "values": document}, separators=(",", ":")).encode()


def _compare_replicas(records: dict[int, dict[str, Any]]) -> None:
    """Every rank sampled the tensors that others hold too; unequal samples are no replicas."""
    seen: dict[str, tuple[int, bytes]] = {}
    samples = [(rank, record["probes"]) for rank, record in records.items() if record.get("probes")]
    if len({json.dumps(probes, sort_keys=True) for _, probes in samples}) <= 1:
        return
    for rank, probes in samples:
        data, width = base64.b64decode(probes["samples"]), probes["width"]
        for place, name in enumerate(probes["names"]):
            sample = data[place * width : (place + 1) * width]
            first, known = seen.setdefault(name, (rank, sample))
            if known != sample:
                raise SaveFailed(
                    f"ranks {first} and {rank} hold different values of {name}, which is saved as replicated",
                    code="S412",
                    where=name,
                    expected="equal parameters on every rank (DDP), or DTensors that say how they are sharded",
                    next_step="if every rank trains its own copy, save it under a plain dict: "
                    '{"model": dict(model.state_dict())}',
                )


def commit(storage: Storage, manifest: Manifest, values: bytes) -> None:
    """Write values, then the manifest, then the hint. Raises ``SaveFailed`` if another run took over."""
    folder = f"{manifest.name}/"
    storage.put(folder + VALUES, values)
    newer = superseded_by(storage, manifest.attempt)
    if newer is not None:
        raise SaveFailed(
            f"attempt {newer} of this run has taken over; attempt {manifest.attempt} commits nothing more",
            code="S413",
            where=storage.url,
            next_step="stop this process: another one trains on",
        )
    data = manifest.to_bytes()
    if not storage.put_if_absent(folder + MANIFEST, data) and storage.read(folder + MANIFEST) != data:
        raise SaveFailed(
            f"{folder}{MANIFEST} exists with other content",
            code="S414",
            where=storage.url_of(folder + MANIFEST),
        )
    hint = {
        "name": manifest.name,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "sequence": manifest.sequence,
    }
    try:
        storage.put(LATEST, json.dumps(hint).encode())
        storage.delete_folder(folder + RECORDS)
    except StorageError:
        pass  # only a hint, and notes that the manifest has taken in: readers look at the manifests


def retain(storage: Storage, keep: Keep, newest: Manifest, verified: Any) -> list[str]:
    """Remove generations that ``keep`` lets go, and what crashed attempts left behind; their names.

    ``verified(stored)`` must say that a kept generation reads back right before anything older goes; the
    last one that does is never removed.
    """
    found = generations(storage)
    keys = retained((Candidate(g.key, g.step, g.metrics, is_pinned(storage, g)) for g in found), keep)
    doomed = [g for g in found if g.key not in keys and g.key < newest.key]
    removed = []
    if doomed:
        kept = [g for g in found if g.key in keys]
        if not any(verified(g) for g in kept):
            return []
        for generation in doomed:
            remove_generation(storage, generation.name)
            append_history(storage, "removed", generation.step, generation.name, generation.bytes, 0.0)
            removed.append(generation.name)
    for name in unfinished(storage, found, newest.key):
        remove_generation(storage, name)
        removed.append(name)
    return removed


def unfinished(storage: Storage, found: list[Generation], newest: tuple[int, int] | None = None) -> list[str]:
    """Folders of saves older than ``newest`` (of those found) that never became checkpoints."""
    limit = newest or max((g.key for g in found), default=(0, 0))
    committed = {g.name for g in found}
    keys = ((name, _key_of(name)) for name in storage.list_folders("") if name not in committed)
    return [name for name, key in keys if key is not None and key < limit]


def remove_generation(storage: Storage, name: str) -> None:
    """The manifest goes first: a half-removed generation is no checkpoint."""
    try:
        storage.delete(f"{name}/{MANIFEST}")
    except NotFoundInStorage:
        pass
    storage.delete_folder(f"{name}/")


def _key_of(name: str) -> tuple[int, int] | None:
    parts = name.split("-")
    if len(parts) == 4 and parts[0] == "step" and all(part.isdigit() for part in parts[1:]):
        return int(parts[2]), int(parts[3])
    return None
