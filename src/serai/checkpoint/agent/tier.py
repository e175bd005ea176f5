"""One tier: a thread that writes generations from the slab to a storage, and commits them.

Tiers know nothing of one another. A failure keeps the generation and tries again later, until a newer
one takes its place; the trainer is told at once.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from serai.checkpoint.agent.ledger import Generation, Ledger, Shard, ShardFile, State
from serai.checkpoint.agent.publish import build_manifest, commit, record_name, retain, superseded_by
from serai.checkpoint.catalog import Generation as Stored
from serai.checkpoint.catalog import check, read_manifest
from serai.checkpoint.format import MANIFEST, Manifest, generation_name
from serai.checkpoint.hashing import chunk_count, chunk_spans, hex_digest
from serai.checkpoint.history import append_history
from serai.checkpoint.policy import Keep
from serai.errors import CheckpointCorrupt, NotFoundInStorage, SaveFailed, SeraiError, StorageError
from serai.storage.base import Storage

__all__ = ["Outcome", "Tier", "shard_record"]

log = logging.getLogger("serai.agent")

_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0
_PEER_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """What became of a generation on a tier; ``error`` is ``None`` when it is durable there."""

    tier: str
    generation: Generation
    seconds: float
    error: SeraiError | None = None
    skipped: bool = False


class Tier:
    """Writes to one storage. ``report`` is called from its thread with every outcome."""

    def __init__(
        self, name: str, storage: Storage, ledger: Ledger, keep: Keep, report: Callable[[Outcome], None]
    ) -> None:
        self.name = name
        self.storage = storage
        self._ledger = ledger
        self._keep = keep
        self._report = report
        self._stop = threading.Event()
        self._busy = False
        self._verified: set[str] = set()
        # Frozen files of this agent's last generation: name → (key, size, checksums).
        self._frozen: dict[str, tuple[str, int, list[str]]] = {}
        self._thread = threading.Thread(target=self._run, name=f"serai-tier-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def set_keep(self, keep: Keep) -> None:
        self._keep = keep

    @property
    def idle(self) -> bool:
        """Nothing is being written or removed."""
        return not self._busy

    def stop(self) -> None:
        self._stop.set()
        with self._ledger.changed:
            self._ledger.changed.notify_all()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._busy = True
            generation = self._ledger.take(self.name)
            if generation is None:
                self._busy = False
                with self._ledger.changed:
                    retry = self._ledger.next_retry(self.name)
                    wait = 5.0 if retry is None else max(0.0, retry - time.monotonic())
                    self._ledger.changed.wait(min(5.0, wait + 0.01))
                continue
            self._process(generation)

    def _process(self, generation: Generation) -> None:
        began = time.monotonic()
        try:
            manifest = self._write(generation)
        except Exception as error:
            problem = (
                error if isinstance(error, SeraiError) else SaveFailed(f"{type(error).__name__}: {error}")
            )
            self._fail(generation, problem, time.monotonic() - began)
            return
        self._ledger.finish(self.name, generation, State.DONE)
        self._report(Outcome(self.name, generation, time.monotonic() - began))
        if manifest is not None:
            seconds = time.monotonic() - began
            append_history(self.storage, "committed", manifest.step, manifest.name, manifest.nbytes, seconds)
            self._retain(manifest)

    def _write(self, generation: Generation) -> Manifest | None:
        """Shards, then records, then (on the node of rank 0) the commit. Raises on any failure."""
        folder = generation_name(generation.step, *generation.key)
        newer = superseded_by(self.storage, generation.key[0])
        if newer is not None:
            raise SaveFailed(
                f"attempt {newer} of this run has taken over", code="S413", where=self.storage.url
            )
        records = {}
        for rank, shard in sorted(generation.shards.items()):
            for file in shard.files:
                if shard.streamed_to != self.name:
                    self._store(folder, shard, file)
            records[rank] = shard_record(shard)
        if not generation.whole:
            for rank, record in records.items():
                self.storage.put(f"{folder}/{record_name(rank)}", json.dumps(record).encode())
        if 0 not in generation.shards:
            self._await_manifest(folder)
            return None
        if not generation.whole:
            records = self._await_records(folder, generation, records)
        manifest, values = build_manifest(
            run=generation.run,
            step=generation.step,
            key=generation.key,
            created=generation.created,
            world_size=generation.world_size,
            records=records,
        )
        commit(self.storage, manifest, values)
        return manifest

    def _store(self, folder: str, shard: Shard, file: ShardFile) -> None:
        """Write one file; a frozen one that is as it was is linked, or copied by the store itself."""
        key = f"{folder}/{file.name}"
        known = self._linkable(shard, file)
        if known is not None:
            try:
                self.storage.copy(known, key)
                self.storage.verify_size(key, file.size)
            except StorageError as error:
                log.warning(
                    "tier %s: %s could not be copied, it is written anew: %s", self.name, known, error
                )
            else:
                self._frozen[file.name] = (key, file.size, hash_file(shard, file))
                return
        self.storage.upload(key, hashing_chunks(shard, file), file.size, stable=True)
        self.storage.verify_size(key, file.size)
        if file.kind == "frozen":
            self._frozen[file.name] = (key, file.size, hash_file(shard, file))

    def _linkable(self, shard: Shard, file: ShardFile) -> str | None:
        """The key of a file of an earlier generation with the same bytes: equal length and checksums."""
        if file.kind != "frozen":
            return None
        key, size, chunks = self._frozen.get(file.name, ("", 0, []))
        return key if size == file.size and chunks == hash_file(shard, file) else None

    def _await_records(
        self, folder: str, generation: Generation, records: dict[int, dict[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        missing = set(range(generation.world_size)) - set(records)
        for rank in self._poll(missing, folder):
            try:
                records[rank] = json.loads(self.storage.read(f"{folder}/{record_name(rank)}"))
            except NotFoundInStorage:
                continue
            missing.discard(rank)
        return records

    def _await_manifest(self, folder: str) -> None:
        waiting = {-1}
        for _ in self._poll(waiting, folder):
            try:
                self.storage.size(f"{folder}/{MANIFEST}")
            except NotFoundInStorage:
                continue
            waiting.clear()

    def _poll(self, missing: set[int], folder: str) -> Iterator[int]:
        """Go round what is missing until nothing is; raises when the other nodes take too long."""
        deadline = time.monotonic() + _PEER_DEADLINE_S
        pause = 0.02
        while missing:
            yield from sorted(missing)
            if not missing:
                return
            if self._stop.is_set() or time.monotonic() > deadline:
                raise SaveFailed(
                    f"{folder} is not complete: other nodes did not write their part",
                    code="S415",
                    where=self.storage.url_of(folder),
                    expected=f"all ranks within {_PEER_DEADLINE_S:.0f} s",
                    next_step="look at the agents' logs on the other nodes",
                )
            time.sleep(pause)
            pause = min(1.0, pause * 1.5)

    def _fail(self, generation: Generation, error: SeraiError, seconds: float) -> None:
        log.warning("tier %s: %s of step %s failed: %s", self.name, generation.key, generation.step, error)
        folder = generation_name(generation.step, *generation.key)
        try:
            if not self._committed(folder):
                # Half a generation only takes room that the next try needs.
                for shard in generation.shards.values():
                    for file in shard.files:
                        self.storage.delete(f"{folder}/{file.name}")
        except StorageError:
            pass
        count = generation.failures[self.name] = generation.failures.get(self.name, 0) + 1
        streamed = any(shard.slot is None for shard in generation.shards.values())
        if streamed or error.code in ("S412", "S413"):
            # Another try would find no bytes to write, or the same answer.
            self._ledger.finish(self.name, generation, State.SKIPPED)
        else:
            delay = min(_LAST_RETRY_S, _FIRST_RETRY_S * 2 ** (count - 1)) * random.uniform(0.5, 1.0)
            self._ledger.finish(self.name, generation, State.FAILED, retry_at=time.monotonic() + delay)
        self._report(Outcome(self.name, generation, seconds, error))

    def _committed(self, folder: str) -> bool:
        try:
            self.storage.size(f"{folder}/{MANIFEST}")
        except NotFoundInStorage:
            return False
        return True

    def _retain(self, newest: Manifest) -> None:
        try:
            for name in retain(self.storage, self._keep, newest, self._reads_back):
                log.info("tier %s: removed %s", self.name, name)
                self._verified.discard(name)
        except SeraiError as error:
            log.warning("tier %s: retention stopped: %s", self.name, error)

    def _reads_back(self, stored: Stored) -> bool:
        """Whether a committed generation reads back as written; asked once for each."""
        if stored.name in self._verified:
            return True
        try:
            manifest = read_manifest(self.storage, stored.name)
            damage = check(self.storage, stored.name, manifest, threads=1)
        except (CheckpointCorrupt, StorageError) as error:
            log.error("tier %s: %s does not read back: %s", self.name, stored.name, error)
            return False
        for item in damage:
            log.error("tier %s: does not read back: %s", self.name, item)
        if damage:
            self._frozen.clear()  # nothing new may be linked to what is damaged
            return False
        self._verified.add(stored.name)
        return True


def hashing_chunks(shard: Shard, file: ShardFile) -> Iterator[memoryview]:
    """The file in chunks, the checksum of each known by the time it is written."""
    memory = shard.memory(file)
    for number, (offset, length) in enumerate(chunk_spans(file.size)):
        _chunk_digest(file, number, memory[offset : offset + length])
        yield memory[offset : offset + length]


def hash_file(shard: Shard, file: ShardFile) -> list[str]:
    """The checksums of a file; computed now where no tier has done so yet."""
    if len(file.chunks) < chunk_count(file.size):
        memory = shard.memory(file)
        for number, (offset, length) in enumerate(chunk_spans(file.size)):
            _chunk_digest(file, number, memory[offset : offset + length])
    return [file.chunks[number] for number in range(chunk_count(file.size))]


def _chunk_digest(file: ShardFile, number: int, view: memoryview) -> None:
    # Two tiers may both compute one: sealed bytes never change, so they find the same.
    if number not in file.chunks:
        file.chunks[number] = hex_digest(view)


def shard_record(shard: Shard) -> dict[str, Any]:
    """What the manifest needs to know of a shard."""
    return {
        "table": shard.table,
        "trees": shard.trees,
        "probes": shard.probes,
        "files": [
            {"name": file.name, "size": file.size, "chunks": hash_file(shard, file)} for file in shard.files
        ],
        "metrics": shard.metrics,
        "software": shard.software,
    }
