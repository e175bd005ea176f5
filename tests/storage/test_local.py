"""LocalStorage alone: durability, links, odd filesystems, kills. The contract is in test_contract.py."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.needs import needs_root

from serai.errors import NotFoundInStorage, StorageDenied, StorageError, StorageFull, StorageTransient
from serai.storage import _posix
from serai.storage._posix import FileWriter, rename_no_replace, translate
from serai.storage.base import Entry
from serai.storage.local import LocalStorage


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


def leftovers(root: Path) -> list[str]:
    return [str(path.relative_to(root)) for path in root.rglob(".serai-tmp-*")]


def aligned(size: int) -> memoryview:
    """``size`` bytes of page-aligned memory, each block of 4 KiB different."""
    memory = mmap.mmap(-1, size)
    view = memoryview(memory)
    for block in range(0, size, 4096):
        view[block : block + 8] = block.to_bytes(8, "little")[: len(view[block : block + 8])]
    return view


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (5 << 20) + 17, 16 << 20])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("direct", [True, False])
def test_upload_writes_every_byte(tmp_path: Path, size: int, shift: int, direct: bool) -> None:
    storage = LocalStorage(tmp_path, direct=direct, writers=3)
    source = aligned(size + shift)[shift:] if size + shift else memoryview(b"")
    third = max(1, size // 3)
    storage.upload("a/b.bin", (source[i : i + third] for i in range(0, size, third)), size)
    assert (tmp_path / "a/b.bin").read_bytes() == bytes(source)
    assert leftovers(tmp_path) == []


def test_upload_may_get_the_same_buffer_again_and_again(storage: LocalStorage) -> None:
    buffer = bytearray(1 << 20)

    def chunks() -> Iterator[memoryview]:
        for value in range(5):
            buffer[:] = bytes([value]) * len(buffer)
            yield memoryview(buffer)

    storage.upload("k", chunks(), 5 << 20)
    assert storage.read("k") == b"".join(bytes([value]) * (1 << 20) for value in range(5))


@pytest.mark.parametrize("given", [9, 11])
def test_a_wrong_announced_size_stores_nothing(storage: LocalStorage, given: int) -> None:
    with pytest.raises(StorageError) as caught:
        storage.upload("k", [memoryview(b"x" * given)], 10)
    assert caught.value.code == "S307"
    assert list(storage.list()) == []
    assert leftovers(storage.path) == []


def test_direct_writes_are_really_used_and_given_up_where_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = aligned(4 << 20)
    calls: list[int] = []
    real = os.pwrite

    def refusing(descriptor: int, data: Any, offset: int) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            calls.append(len(data))
            raise OSError(errno.EINVAL, "refused")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    path = tmp_path / "f"
    path.touch()
    with FileWriter(path, len(view), direct=True) as writer:
        if not writer.is_direct:
            pytest.skip("this filesystem opens nothing with O_DIRECT")
        writer.write(view[: 2 << 20], 0)
        assert not writer.is_direct
        writer.write(view[2 << 20 :], 2 << 20)
        writer.finish()
    assert len(calls) == 1
    assert path.read_bytes() == bytes(view)


def test_short_writes_are_continued(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, memoryview(data)[:100_001], offset))
    data = os.urandom(1_000_000)
    storage.put("k", data)
    storage._direct = False
    storage.upload("u", [memoryview(data)], len(data))
    monkeypatch.undo()
    assert storage.read("k") == data
    assert storage.read("u") == data


def test_short_reads_are_continued_and_a_short_file_is_an_error(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(10_000)
    storage.put("k", data)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][:777]], offset))
    assert storage.read("k") == data
    with pytest.raises(StorageError) as caught:
        storage.read_into("k", 9_000, memoryview(bytearray(1_001)))
    assert caught.value.code == "S307"


def order_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records fsync, rename and link, by what kind of thing they touch."""
    calls: list[str] = []

    def record(name: str, describe: Callable[..., str]) -> None:
        real = getattr(os, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls.append(describe(*args))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, wrapped)

    record("fsync", lambda fd: f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name.partition('-tmp-')[0]}")
    record("rename", lambda _, target: f"rename {Path(target).name}")
    record("link", lambda _, target: f"link {Path(target).name}")
    return calls


def test_bytes_then_name_then_folder(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.put("a/first", b"1")
    calls = order_of_calls(monkeypatch)
    storage.put("a/k", b"1")
    assert calls == ["fsync .serai", "rename k", "fsync a"]
    calls.clear()
    assert storage.put_if_absent("a/m", b"1")
    assert calls == ["fsync .serai", "link m", "fsync a"]
    calls.clear()
    storage.upload("a/u", [memoryview(b"1")], 1)
    assert calls == ["fsync .serai", "rename u", "fsync a"]


def test_new_folders_are_flushed_up_to_the_root(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = order_of_calls(monkeypatch)
    storage.put("a/b/k", b"1")
    # b's entry lies in a, a's in root, root's in tmp_path; then the object itself.
    parent = storage.path.parent.name
    assert calls == ["fsync a", "fsync root", f"fsync {parent}", "fsync .serai", "rename k", "fsync b"]


@pytest.mark.parametrize("number", sorted(_posix.NO_LINKS))
def test_put_if_absent_without_hard_links(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_links)
    assert storage.put_if_absent("k", b"first")
    assert not storage.put_if_absent("k", b"second")
    assert storage.read("k") == b"first"
    storage.copy("k", "copied/k")
    assert storage.read("copied/k") == b"first"
    assert leftovers(storage.path) == []


def test_a_filesystem_with_no_atomic_create_is_refused(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no")

    class Libc:
        fallocate = _posix._libc.fallocate

        @staticmethod
        def renameat2(*_: Any) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(_posix, "_libc", Libc)
    with pytest.raises(StorageError) as caught:
        storage.put_if_absent("k", b"1")
    assert caught.value.code == "S306"
    assert not storage.probe_conditional_put()


def test_rename_no_replace(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    assert not rename_no_replace(tmp_path / "a", tmp_path / "b")
    assert rename_no_replace(tmp_path / "a", tmp_path / "c")
    with pytest.raises(FileNotFoundError):
        rename_no_replace(tmp_path / "a", tmp_path / "d")


def test_a_link_repeated_by_the_network_counts_as_ours(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def repeated(source: Any, target: Any) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "the second try finds the first one's result")

    monkeypatch.setattr(os, "link", repeated)
    assert storage.put_if_absent("k", b"mine")


def test_copy_is_a_link_and_a_later_put_does_not_reach_through_it(storage: LocalStorage) -> None:
    storage.put("one", b"old")
    storage.copy("one", "two")
    assert (storage.path / "one").samefile(storage.path / "two")
    storage.copy("one", "two")
    storage.put("one", b"new")
    assert storage.read("two") == b"old"
    assert leftovers(storage.path) == []


def test_links_that_leave_the_root_are_refused(storage: LocalStorage, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("x")
    storage.put("inside/k", b"1")
    (storage.path / "folder").symlink_to(outside)
    (storage.path / "file").symlink_to(outside / "secret")
    (storage.path / "good").symlink_to(storage.path / "inside/k")
    for act in (
        lambda: storage.read("folder/secret"),
        lambda: storage.read("file"),
        lambda: storage.put("folder/new", b"1"),
        lambda: storage.put_if_absent("folder/new", b"1"),
        lambda: storage.delete("folder/secret"),
        lambda: storage.delete_folder("folder/sub/"),
        lambda: storage.list_folders("folder/"),
        lambda: list(storage.list("folder/")),
    ):
        with pytest.raises(StorageError, match="symbolic link") as caught:
            act()
        assert caught.value.code == "S305"
    assert sorted(storage.list(), key=lambda e: e.key) == [Entry("good", 1), Entry("inside/k", 1)]
    storage.delete_folder("folder/")  # the link is no folder of ours
    assert (outside / "secret").read_text() == "x"


def test_a_deleted_folder_vanishes_at_once(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        storage.put(f"step/{number}", b"1")
    storage.put("other", b"1")
    real = os.unlink
    seen: list[list[Entry]] = []

    def watched(path: Any) -> None:
        seen.append(list(storage.list()))
        real(path)

    monkeypatch.setattr(os, "unlink", watched)
    storage.delete_folder("step/")
    assert len(seen) == 5
    assert all(entries == [Entry("other", 1)] for entries in seen)
    assert leftovers(storage.path) == []


def test_stale_work_is_swept_when_old_only(storage: LocalStorage) -> None:
    storage.put("a/k", b"1")
    old, new = storage.path / "a/.serai-tmp-0-x", storage.path / "a/.serai-tmp-1-y"
    old_folder = storage.path / ".serai-tmp-2-step"
    old_folder.mkdir()
    for path in (old, new, old_folder / "shard"):
        path.write_text("half")
    for path in (old, old_folder):
        os.utime(path, (1, 1))
    assert sorted(storage.remove_stale(older_than=60)) == sorted([old, old_folder])
    assert new.exists()
    assert storage.read("a/k") == b"1"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, NotFoundInStorage),
        (errno.EACCES, StorageDenied),
        (errno.EPERM, StorageDenied),
        (errno.EROFS, StorageDenied),
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.ETIMEDOUT, StorageTransient),
        (errno.ESTALE, StorageTransient),
        (errno.EIO, StorageError),
    ],
)
def test_errno_becomes_the_right_error(tmp_path: Path, number: int, kind: type[StorageError]) -> None:
    error = translate(OSError(number, "x"), key="a/k", root=tmp_path, action="write")
    assert type(error) is kind
    assert error.where == f"{tmp_path}/a/k"
    assert error.next_step


def test_a_failing_flush_is_an_error_and_leaves_nothing(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("first", b"1")

    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "the disk is failing")

    monkeypatch.setattr(os, "fsync", failing)
    for act in (
        lambda: storage.put("k", b"1"),
        lambda: storage.put_if_absent("k", b"1"),
        lambda: storage.upload("k", [memoryview(b"1")], 1),
    ):
        with pytest.raises(StorageError, match="EIO"):
            act()
    assert [entry.key for entry in storage.list()] == ["first"]
    assert leftovers(storage.path) == []


def test_a_file_where_a_folder_is_needed(storage: LocalStorage) -> None:
    storage.put("a", b"1")
    with pytest.raises(StorageError, match="a file stands where a/b needs a folder"):
        storage.put("a/b", b"1")
    storage.put("c/d", b"1")
    with pytest.raises(StorageError, match="c is a folder"):
        storage.put("c", b"1")
    with pytest.raises(NotFoundInStorage, match="c is a folder"):
        storage.size("c")


def test_folders_that_come_and_go_under_concurrent_writers(storage: LocalStorage) -> None:
    """delete prunes empty folders; a writer of the same folder must never fail because of it."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(60):
                storage.put(f"x/y/{number}", b"1")
                storage.delete(f"x/y/{number}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert list(storage.list()) == []
    assert os.listdir(storage.path) == []


WRITER = textwrap.dedent(
    """
    import sys
    from serai.storage.local import LocalStorage
    storage = LocalStorage(sys.argv[1])
    size = 8 << 20
    print("ready", flush=True)
    number = 0
    while True:
        body = number.to_bytes(4, "little") * (size // 4)
        storage.upload("big", (memoryview(body)[i:i + (1 << 20)] for i in range(0, size, 1 << 20)), size)
        storage.put("small", body[:4096])
        number += 1
    """
)


def test_kill_9_during_writes_never_shows_a_partial_object(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "root")
    seen_partial_work = False
    for attempt in range(12):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(storage.path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        with writer, writer.stdout:
            assert writer.stdout.readline() == b"ready\n"
            # A different moment each time; the process is killed in whatever call it is.
            threading.Event().wait(0.02 + 0.013 * attempt)
            writer.send_signal(signal.SIGKILL)
        seen_partial_work |= bool(leftovers(storage.path))
        for key, size in (("big", 8 << 20), ("small", 4096)):
            try:
                body = storage.read(key)
            except NotFoundInStorage:
                continue
            assert len(body) == size
            assert body == body[:4] * (size // 4), f"{key} mixes two writes"
        assert {entry.key for entry in storage.list()} <= {"big", "small"}
    assert seen_partial_work, "no kill ever hit a write: the test proves nothing"
    storage.remove_stale(older_than=-1)
    assert leftovers(storage.path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@needs_root
def test_a_full_disk_is_said_and_the_old_object_stays(small_disk: Path) -> None:
    storage = LocalStorage(small_disk)
    storage.put("k", b"old")
    big = memoryview(bytes(8 << 20))
    for act in (
        lambda: storage.put("k", big),
        lambda: storage.put_if_absent("new", bytes(big)),
        lambda: storage.upload("k", [big], len(big)),
    ):
        with pytest.raises(StorageFull) as caught:
            act()
        assert "MiB" in (caught.value.expected or "")
    assert [(entry.key, entry.size) for entry in storage.list()] == [("k", 3)]
    assert storage.read("k") == b"old"
    assert leftovers(small_disk) == []
    storage.put("after", bytes(1 << 20))  # the room of the failed writes is free again


@needs_root
def test_a_read_only_mount_is_denied(small_disk: Path) -> None:
    storage = LocalStorage(small_disk)
    storage.put("k", b"1")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StorageDenied, match="Read-only"):
        storage.put("k", b"2")
    assert storage.read("k") == b"1"


@needs_root
def test_a_folder_of_somebody_else_is_denied(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    for above in [tmp_path, *tmp_path.parents]:
        if above.stat().st_mode & 0o005 != 0o005 and "pytest" in str(above):
            above.chmod(0o755)
    script = (
        "import os, sys\n"
        "from serai.storage.local import LocalStorage\n"
        "from serai.errors import StorageDenied\n"
        "os.setuid(65534)\n"
        "try:\n"
        "    LocalStorage(sys.argv[1]).put('a/k', b'1')\n"
        "except StorageDenied as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, folder], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.startswith("[S302] this user may not write a/k: Permission denied")
    assert "user 65534" in result.stdout
