"""One suite for every kind of storage: whatever the place, these must hold."""

from __future__ import annotations

import os
import threading

import pytest

from serai.errors import NotFoundInStorage, StorageError
from serai.storage.base import Entry, Storage


def keys(storage: Storage, prefix: str = "") -> list[str]:
    return sorted(entry.key for entry in storage.list(prefix))


@pytest.mark.parametrize("size", [0, 1, 100_003])
def test_what_was_put_is_read_back(storage: Storage, size: int) -> None:
    data = os.urandom(size)
    storage.put("a/b/c.bin", data)
    assert storage.read("a/b/c.bin") == data
    assert storage.size("a/b/c.bin") == size
    storage.put("a/b/c.bin", memoryview(b"shorter"))
    assert storage.read("a/b/c.bin") == b"shorter"


def test_names_with_odd_letters(storage: Storage) -> None:
    for key in ("with space/ü€ #?%41&=+.json", "step-00000001-ab_c.d~e/é"):
        storage.put(key, key.encode())
        assert storage.read(key) == key.encode()
    assert keys(storage, "with space/") == ["with space/ü€ #?%41&=+.json"]
    assert len(keys(storage)) == 2


def test_ranges_are_filled_wholly_or_refused(storage: Storage) -> None:
    data = bytes(range(256)) * 40
    storage.put("k", data)
    buffer = bytearray(1000)
    storage.read_into("k", 3000, memoryview(buffer))
    assert buffer == data[3000:4000]
    storage.read_into("k", len(data), memoryview(bytearray(0)))
    for offset in (len(data) - 999, len(data), len(data) + 5000):
        with pytest.raises(StorageError) as caught:
            storage.read_into("k", offset, memoryview(buffer))
        assert caught.value.code == "S307"
    with pytest.raises(ValueError, match="negative"):
        storage.read_into("k", -1, memoryview(buffer))


def test_a_missing_object(storage: Storage) -> None:
    for act in (
        lambda: storage.size("no/thing"),
        lambda: storage.read("no/thing"),
        lambda: storage.read_into("no/thing", 0, memoryview(bytearray(1))),
        lambda: storage.copy("no/thing", "other"),
    ):
        with pytest.raises(NotFoundInStorage, match="no/thing") as caught:
            act()
        assert caught.value.code == "S301"
    storage.delete("no/thing")
    storage.delete_folder("no/")
    assert list(storage.list()) == []
    assert storage.list_folders() == []


def test_put_if_absent_keeps_the_first(storage: Storage) -> None:
    assert storage.put_if_absent("attempts/1", b"first")
    assert not storage.put_if_absent("attempts/1", b"second")
    assert storage.read("attempts/1") == b"first"
    storage.put("taken", b"by put")
    assert not storage.put_if_absent("taken", b"late")


def test_of_sixteen_writers_exactly_one_creates(storage: Storage) -> None:
    start = threading.Barrier(16)
    results: dict[int, bool] = {}

    def create(number: int) -> None:
        start.wait(30)
        results[number] = storage.put_if_absent("attempts/1", f"writer {number}".encode() * 1000)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(results) == 16
    winners = [number for number, created in results.items() if created]
    assert len(winners) == 1
    assert storage.read("attempts/1") == f"writer {winners[0]}".encode() * 1000


def test_listing(storage: Storage) -> None:
    for key in ("latest.json", "step-1/a", "step-1/deep/b", "step-10/a", "other/x"):
        storage.put(key, key.encode())
    assert sorted(storage.list("step-1/"), key=lambda e: e.key) == [
        Entry("step-1/a", 8),
        Entry("step-1/deep/b", 13),
    ]
    assert keys(storage, "step-1") == ["step-1/a", "step-1/deep/b", "step-10/a"]
    assert keys(storage, "step-1/deep/b") == ["step-1/deep/b"]
    assert keys(storage, "nothing/") == []
    assert keys(storage) == ["latest.json", "other/x", "step-1/a", "step-1/deep/b", "step-10/a"]
    assert sorted(storage.list_folders()) == ["other", "step-1", "step-10"]
    assert storage.list_folders("step-1/") == ["deep"]
    assert storage.list_folders("nothing/") == []


def test_deleting(storage: Storage) -> None:
    for key in ("step-1/a", "step-1/deep/b", "step-10/a", "latest.json"):
        storage.put(key, b"1")
    storage.delete_folder("step-1/")
    assert keys(storage) == ["latest.json", "step-10/a"]
    storage.delete("step-10/a")
    assert storage.list_folders() == []
    assert keys(storage) == ["latest.json"]


def test_upload_in_chunks(storage: Storage) -> None:
    size = (11 << 20) + 12345
    data = os.urandom(size)
    buffer = bytearray(3 << 20)

    def chunks():  # type: ignore[no-untyped-def]
        for offset in range(0, size, len(buffer)):
            part = data[offset : offset + len(buffer)]
            buffer[: len(part)] = part  # one buffer, refilled: allowed by the contract
            yield memoryview(buffer)[: len(part)]

    storage.upload("step-1/shard", chunks(), size)
    assert storage.size("step-1/shard") == size
    storage.verify_size("step-1/shard", size)
    assert storage.read("step-1/shard") == data
    storage.upload("step-1/shard", [memoryview(b"new")], 3)
    assert storage.read("step-1/shard") == b"new"
    storage.upload("step-1/empty", [], 0)
    assert storage.read("step-1/empty") == b""


@pytest.mark.parametrize("chunk", [1 << 20, 7 << 20])
def test_stable_chunks(storage: Storage, chunk: int) -> None:
    size = (23 << 20) + 12345
    data = memoryview(os.urandom(size))
    asked = []

    def chunks():  # type: ignore[no-untyped-def]
        for offset in range(0, size, chunk):
            asked.append(offset)
            yield data[offset : offset + chunk]

    storage.upload("shard", chunks(), size, stable=True)
    assert storage.read("shard") == data
    assert asked == list(range(0, size, chunk))


def test_a_url_of_an_object(storage: Storage) -> None:
    root, _, query = storage.url.partition("?")
    assert storage.url_of("step-1/a") == f"{root}/step-1/a" + (f"?{query}" if query else "")


def test_a_failing_source_or_a_wrong_size_stores_nothing(storage: Storage) -> None:
    def failing():  # type: ignore[no-untyped-def]
        yield memoryview(bytes(6 << 20))
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        storage.upload("k", failing(), 12 << 20)
    for given in (9 << 20, 11 << 20):
        with pytest.raises(StorageError) as caught:
            storage.upload("k", [memoryview(bytes(given))], 10 << 20)
        assert caught.value.code == "S307"
    assert list(storage.list()) == []


def test_verify_size_and_checksum(storage: Storage) -> None:
    import xxhash

    data = os.urandom(300_000)
    storage.put("k", data)
    storage.verify_size("k", 300_000)
    assert storage.checksum("k") == xxhash.xxh3_128(data).hexdigest()
    assert storage.checksum("k", block=1 << 16) == xxhash.xxh3_128(data).hexdigest()
    with pytest.raises(StorageError, match="300000 bytes where 5 were written"):
        storage.verify_size("k", 5)


def test_copy(storage: Storage) -> None:
    storage.put("step-1/shard", b"same bytes")
    storage.copy("step-1/shard", "step-2/shard")
    storage.delete_folder("step-1/")
    assert storage.read("step-2/shard") == b"same bytes"
    storage.put("other", b"x")
    storage.copy("other", "step-2/shard")
    assert storage.read("step-2/shard") == b"x"
    storage.copy("other", "other")
    assert storage.read("other") == b"x"


def test_the_probe_leaves_nothing(storage: Storage) -> None:
    assert storage.probe_conditional_put() is True
    assert list(storage.list()) == []


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".", "a/./b", ".serai-tmp-x", "a\0b", "a\\b"]
)
def test_keys_that_are_none(storage: Storage, key: str) -> None:
    for act in (
        lambda: storage.put(key, b"1"),
        lambda: storage.put_if_absent(key, b"1"),
        lambda: storage.upload(key, [memoryview(b"1")], 1),
        lambda: storage.read(key),
        lambda: storage.size(key),
        lambda: storage.delete(key),
        lambda: storage.copy("a", key),
        lambda: storage.copy(key, "a"),
    ):
        with pytest.raises(StorageError) as caught:
            act()
        assert caught.value.code == "S305"


@pytest.mark.parametrize("prefix", ["", "/", "a", "../", "a/../", "a//"])
def test_folders_that_are_none(storage: Storage, prefix: str) -> None:
    with pytest.raises(StorageError) as caught:
        storage.delete_folder(prefix)
    assert caught.value.code == "S305"
    if prefix:
        with pytest.raises(StorageError):
            storage.list_folders(prefix)
