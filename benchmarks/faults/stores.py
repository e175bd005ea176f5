"""An object store that misbehaves: 5xx, answers lost after success, short and changed reads, ignored conditions."""

from __future__ import annotations

import builtins
import shutil
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import serai
from benchmarks.faults.crashes import scratch
from benchmarks.faults.judge import Judge, Saved, Verdict, make_state
from benchmarks.faults.machine import agent_in_thread
from benchmarks.faults.tally import Outcome, Tally
from serai.errors import NotFoundInStorage, SaveFailed, SeraiError, StorageError, StorageTransient
from serai.storage.base import Entry, Storage

__all__ = ["KINDS", "FaultyStore", "try_stores"]

Key = tuple[int, int]
_LIMIT_S = 20.0

KINDS = (
    "500",
    "answer lost after success",
    "short read",
    "changed read",
    "condition ignored",
    "5xx until mended",
)


class FaultyStore(Storage):
    """Objects in a dict. The request number ``at`` (counted while ``armed``) meets the fault ``kind``."""

    def __init__(self, kind: str, at: int) -> None:
        self.url = "s3://fake/root"
        self.objects: dict[str, bytes] = {}
        self.kind = kind
        self.at = at
        self.armed = False
        self.mended = False
        self.count = -1
        self.hit = ""
        self._lock = threading.RLock()

    def _now(self, request: str, kinds: tuple[str, ...]) -> bool:
        """Whether this request is the one to fail."""
        if not self.armed or self.mended or self.kind not in kinds:
            return False
        self.count += 1
        struck = self.count == self.at or (self.kind == "5xx until mended" and self.count > self.at)
        if struck:
            self.hit = self.hit or request
        return struck

    def _refuse(self, request: str) -> None:
        if self._now(request, ("500", "5xx until mended")):
            raise StorageTransient(f"the store answered 500 to {request}", where=self.url)

    def _lose(self, request: str) -> None:
        if self._now(request, ("answer lost after success",)):
            raise StorageTransient(f"the answer to {request} was lost", where=self.url)

    def size(self, key: str) -> int:
        with self._lock:
            self._refuse(f"head {key}")
            if key not in self.objects:
                raise NotFoundInStorage(f"there is no {key}", where=self.url)
            return len(self.objects[key])

    def read(self, key: str) -> bytes:
        with self._lock:
            data = bytearray(self.size(key))
            self.read_into(key, 0, memoryview(data))
            return bytes(data)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        with self._lock:
            self._refuse(f"get {key}")
            if key not in self.objects:
                raise NotFoundInStorage(f"there is no {key}", where=self.url)
            part = self.objects[key][offset : offset + len(buffer)]
            if len(part) != len(buffer) or self._now(f"get {key}", ("short read",)):
                raise StorageError(f"{key} ends early", code="S307", where=self.url)
            buffer[:] = part
            if len(buffer) and self._now(f"get {key}", ("changed read",)):
                buffer[len(buffer) // 2] ^= 4

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._lock:
            self._refuse(f"put {key}")
            self.objects[key] = bytes(data)
            self._lose(f"put {key}")

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._lock:
            self._refuse(f"put-if-absent {key}")
            ignored = self.kind == "condition ignored"
            if key in self.objects and not ignored:
                return False
            self.objects[key] = bytes(data)
            self._lose(f"put-if-absent {key}")
            return True

    def upload(self, key: str, chunks: Iterable[memoryview], size: int, *, stable: bool = False) -> None:
        self.put(key, b"".join(bytes(chunk) for chunk in chunks))

    def copy(self, key: str, new_key: str) -> None:
        self.put(new_key, self.read(key))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        with self._lock:
            self._refuse(f"list {prefix}")
            found = [Entry(key, len(data)) for key, data in self.objects.items() if key.startswith(prefix)]
        yield from found

    def list_folders(self, prefix: str = "") -> builtins.list[str]:
        with self._lock:
            self._refuse(f"list {prefix}")
            rest = (key[len(prefix) :] for key in self.objects if key.startswith(prefix))
            return sorted({name.partition("/")[0] for name in rest if "/" in name})

    def delete(self, key: str) -> None:
        with self._lock:
            self._refuse(f"delete {key}")
            self.objects.pop(key, None)
            self._lose(f"delete {key}")

    def delete_folder(self, prefix: str) -> None:
        for entry in [*self.list(prefix)]:
            self.delete(entry.key)

    def probe_conditional_put(self) -> bool:
        answer = self.put_if_absent("probe", b"1") and not self.put_if_absent("probe", b"2")
        self.delete("probe")
        return answer


def _one(kind: str, at: int, keep: int) -> tuple[str, Verdict]:
    """Two saves work, the third meets the fault (restores too, while it lasts), a fourth must work."""
    folder = Path(scratch())
    store = FaultyStore(kind, at)
    saves: dict[str, Saved] = {}
    durable: list[Key] = []
    judge = Judge(saves)
    try:
        with agent_in_thread(folder / "root", committed=durable.append, storage=store):
            try:
                checkpointer = serai.Checkpointer(folder / "root", keep=serai.Keep(last=keep), memory=False)
            except SeraiError as error:
                return kind, Verdict(Outcome.ERROR, error.message)
            for step in (1, 2, 3, 4):
                store.armed = step == 3 and kind not in ("short read", "changed read")
                store.mended = step == 4
                handle = checkpointer.save(step, make_state(step))
                _, _, attempt, sequence = handle.generation.split("-")
                saves[handle.generation] = Saved((int(attempt), int(sequence)), step, step)
                limit = time.monotonic() + _LIMIT_S
                while not handle.done("durable") and handle.error is None and time.monotonic() < limit:
                    time.sleep(0.001)
                if not handle.done("durable") and (handle.error is None or step == 4):
                    return store.hit, Verdict(Outcome.HUNG, f"step {step} is not durable: {handle.error}")
                if step == 3 and kind == "5xx until mended":
                    store.armed = False
                    seen = judge.try_restore(store, least=max(durable))
                    store.armed = True
                    if seen.outcome is not Outcome.NEWEST:
                        return store.hit, Verdict(
                            Outcome.WRONG, f"while failing: {seen.detail} ({store.hit})"
                        )
            store.mended = False
            store.armed = kind in ("short read", "changed read")
            try:
                checkpointer.close(_LIMIT_S)
            except SaveFailed as error:
                return store.hit, Verdict(Outcome.WRONG, f"close: {error.message}")
            verdict = judge.try_restore(store, least=max(durable))
            if verdict.outcome is Outcome.OLDER and not (store.hit and verdict.warned):
                return store.hit, Verdict(Outcome.WRONG, f"{verdict.detail} ({store.hit})")
            reading = keep == 1 and kind in ("short read", "changed read")
            if verdict.outcome is Outcome.WRONG and reading and "is lost" in verdict.detail:
                # The only generation could not be read just now: an error is all that is left.
                return store.hit, Verdict(Outcome.ERROR, verdict.detail)
            return store.hit, verdict
    finally:
        judge.close()
        shutil.rmtree(folder, ignore_errors=True)


def try_stores(tally: Tally, *, stride: int) -> None:
    """Every request of a save (and of a restore, for faults of reading) in turn, each kind of fault."""
    number = 0
    for kind in KINDS:
        for keep in (1, 2):
            for at in range(80):
                number += 1
                if number % stride:
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    hit, verdict = _one(kind, at, keep)
                if not hit:
                    break  # there are no more requests than that
                tally.add(f"store: {kind}", verdict.outcome, f"{hit}, keep={keep}: {verdict.detail}")
                if kind == "condition ignored":
                    break
