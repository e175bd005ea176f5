"""Storage in a folder: atomic by rename and link, durable by fsync of file and folder."""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import secrets
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from serai.errors import NotFoundInStorage, StorageError
from serai.storage._posix import BLOCK, NO_LINKS, FileWriter, address_of, rename_no_replace, translate
from serai.storage.base import Entry, Storage
from serai.storage.keys import TEMPORARY, check_folder, check_key, check_prefix

__all__ = ["LocalStorage"]

_READ_BLOCK = 64 << 20
_DIRECT_READ = 1 << 20
_ATTEMPTS = 20  # against a folder that another process prunes between our mkdir and our open

T = TypeVar("T")


class LocalStorage(Storage):
    """Objects are files under ``path``; the folder is made at the first write.

    A write goes to a temporary name in the same folder, is flushed to the disk, and only then gets its
    name; a process killed in between leaves a temporary file that no listing shows and
    ``remove_stale`` sweeps.

    Args:
        path: the root; ``~`` is expanded.
        writers: threads that write one ``upload``.
        direct: write large objects past the page cache (``O_DIRECT``) where the filesystem allows it.
    """

    def __init__(self, path: str | Path, *, writers: int = 4, direct: bool = True) -> None:
        self.path = Path(os.path.realpath(Path(path).expanduser()))
        self.url = self.path.as_uri()
        self._direct = direct
        self._writers = max(1, writers)

    def __repr__(self) -> str:
        return f"LocalStorage({str(self.path)!r})"

    # Reading

    def size(self, key: str) -> int:
        path = self._existing(key)
        with self._errors(key, "read"):
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                raise NotFoundInStorage(f"{key} is a folder, no object", where=str(path))
            return found.st_size

    def read(self, key: str) -> bytes:
        with self._opened(key) as (descriptor, size):
            data = bytearray(size)
            self._fill(descriptor, key, 0, memoryview(data))
            return bytes(data)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        with self._opened(key) as (descriptor, _):
            self._fill(descriptor, key, offset, buffer.cast("B"))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        check_prefix(prefix)
        start = prefix.rpartition("/")[0]
        pending = [start]
        while pending:
            folder = pending.pop()
            for entry in self._scan(folder):
                key = f"{folder}/{entry.name}" if folder else entry.name
                # A folder is worth entering when it lies below the prefix or on the way to it.
                if entry.is_dir(follow_symlinks=False):
                    if f"{key}/".startswith(prefix):
                        pending.append(key)
                    continue
                if key.startswith(prefix) and (size := self._file_size(entry)) is not None:
                    yield Entry(key, size)

    def list_folders(self, prefix: str = "") -> builtins.list[str]:
        folder = check_folder(prefix)[:-1] if prefix else ""
        names = []
        for entry in self._scan(folder):
            if entry.is_dir(follow_symlinks=False):
                below = f"{folder}/{entry.name}" if folder else entry.name
                if next(iter(self._scan(below)), None) is not None:
                    names.append(entry.name)
        return sorted(names)

    # Writing

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._errors(key, "write"), self._temporary(key) as (temporary, target):
            self._write_all(temporary, data)
            os.rename(temporary, target)
            _sync_folder(target.parent)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._errors(key, "write"), self._temporary(key) as (temporary, target):
            self._write_all(temporary, data)
            created = _link_no_replace(temporary, target)
            # The loser flushes too: it will act on "somebody has it", so that must survive as well.
            _sync_folder(target.parent)
            return created

    def upload(self, key: str, chunks: Iterable[memoryview], size: int, *, stable: bool = False) -> None:
        with self._errors(key, "write"), self._temporary(key) as (temporary, target):
            with (
                FileWriter(temporary, size, direct=self._direct) as writer,
                ThreadPoolExecutor(self._writers, thread_name_prefix="serai-upload") as pool,
            ):
                pending: deque[Future[None]] = deque()
                offset = 0
                for chunk in chunks:
                    view = chunk.cast("B")
                    if offset + len(view) > size:
                        raise _wrong_size(key, size, f"more than {offset + len(view) - 1}")
                    for begin, end in writer.pieces(len(view), self._writers):
                        pending.append(pool.submit(writer.write, view[begin:end], offset + begin))
                    offset += len(view)
                    # What may be refilled has to be written first; what is stable only has to be bounded.
                    while len(pending) > (2 * self._writers if stable else 0):
                        pending.popleft().result()
                while pending:
                    pending.popleft().result()
                if offset != size:
                    raise _wrong_size(key, size, str(offset))
                writer.finish()
            os.rename(temporary, target)
            _sync_folder(target.parent)

    def copy(self, key: str, new_key: str) -> None:
        source = self._existing(key)
        with self._errors(new_key, "write"), self._temporary(new_key) as (temporary, target):
            linked = temporary.with_name(_temporary_name(target.name))
            try:
                os.link(source, linked)
            except FileNotFoundError:
                raise NotFoundInStorage(f"there is no {key}", where=str(source)) from None
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                size = self.size(key)
                self.upload(new_key, self._blocks(key, size), size)
                return
            os.rename(linked, target)
            # rename() does nothing when both names were one file already: its second name stays.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(linked)
            _sync_folder(target.parent)

    def delete(self, key: str) -> None:
        path = self._target(key)
        with self._errors(key, "delete"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)
            self._prune(path.parent)

    def delete_folder(self, prefix: str) -> None:
        folder = self._target(check_folder(prefix)[:-1])
        # Renamed first: a process killed in the middle never leaves half a folder visible.
        doomed = folder.with_name(_temporary_name(folder.name))
        with self._errors(prefix, "delete"):
            try:
                if not stat.S_ISDIR(os.lstat(folder).st_mode):
                    return
                os.rename(folder, doomed)
            except (FileNotFoundError, NotADirectoryError):
                return
            _sync_folder(folder.parent)
            _remove_tree(doomed)
            self._prune(folder.parent)

    def remove_stale(self, *, older_than: float = 24 * 3600) -> builtins.list[Path]:
        """Sweep what killed writers left, when untouched for ``older_than`` seconds; what was removed."""
        removed = []
        limit = time.time() - older_than
        for folder, folders, files in os.walk(self.path):
            for name in [*files, *folders]:
                if name.startswith(TEMPORARY):
                    path = Path(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        if os.lstat(path).st_mtime > limit:
                            continue
                        _remove_tree(path) if name in folders else os.unlink(path)
                        removed.append(path)
            folders[:] = [name for name in folders if not name.startswith(TEMPORARY)]
        return removed

    def probe_conditional_put(self) -> bool:
        """Whether this folder honours ``put_if_absent``; tried with a small object, then removed."""
        key = f"probe-{secrets.token_hex(8)}"
        try:
            return self.put_if_absent(key, b"1") and not self.put_if_absent(key, b"2")
        except StorageError as error:
            if error.code == "S306":
                return False
            raise
        finally:
            self.delete(key)

    # Parts

    def _target(self, key: str) -> Path:
        """Where ``key`` is written: its folder may be a link, but only to inside the root."""
        path = self.path / check_key(key)
        folder = os.path.realpath(path.parent)
        self._inside(key, folder)
        return Path(folder, path.name)

    def _existing(self, key: str) -> Path:
        path = os.path.realpath(self.path / check_key(key))
        self._inside(key, path)
        return Path(path)

    def _inside(self, key: str, path: str) -> None:
        if os.path.commonpath([path, self.path]) != str(self.path):
            raise StorageError(
                f"{key} leads out of the storage through a symbolic link",
                code="S305",
                where=f"{self.path / key} -> {path}",
                expected=f"a place inside {self.path}",
                next_step="remove the link, or open the folder that it points to",
            )

    def _scan(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """The entries of a folder but the unfinished ones; none when it does not exist."""
        path = self._existing(folder) if folder else self.path
        with self._errors(folder, "list"):
            try:
                iterator = os.scandir(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            with iterator:
                for entry in iterator:
                    if not entry.name.startswith(TEMPORARY):
                        yield entry

    def _file_size(self, entry: os.DirEntry[str]) -> int | None:
        """The size of what the entry shows; ``None`` when it vanished, is no file or leads outside."""
        try:
            if entry.is_symlink():
                real = os.path.realpath(entry.path)
                if os.path.commonpath([real, self.path]) != str(self.path):
                    return None
            found = entry.stat()
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        """The descriptor and size of one object; a later ``put`` does not change what it shows."""
        path = self._existing(key)
        with self._errors(key, "read"):
            # Without O_NONBLOCK the opening of a named pipe would wait for a writer for ever.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise NotFoundInStorage(f"{key} is a folder, no object", where=str(path))
                yield descriptor, found.st_size
            finally:
                os.close(descriptor)

    def _fill(self, descriptor: int, key: str, offset: int, view: memoryview) -> None:
        done = self._read_direct(descriptor, offset, view)
        while done < len(view):
            count = os.preadv(descriptor, [view[done : done + _READ_BLOCK]], offset + done)
            if count == 0:
                raise StorageError(
                    f"{key} ends at byte {offset + done}",
                    code="S307",
                    where=f"{self.path / key}@{offset}",
                    expected=f"{len(view)} bytes from offset {offset}",
                    next_step="serai ckpt verify: the file was cut short",
                )
            done += count

    def _read_direct(self, opened: int, offset: int, view: memoryview) -> int:
        """Read whole blocks past the page cache; how many bytes from the start that were.

        Only for large reads into aligned memory: a cold file comes at the speed of the disk, with no page
        of the cache made for it. Where the filesystem refuses, the caller reads through the cache.
        """
        whole = len(view) // BLOCK * BLOCK
        if not self._direct or whole < _DIRECT_READ or offset % BLOCK or address_of(view) % BLOCK:
            return 0
        try:
            # The same file, whatever its name shows by now.
            descriptor = os.open(f"/proc/self/fd/{opened}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return 0
        done = 0
        try:
            while done < whole:
                count = os.preadv(descriptor, [view[done : min(done + _READ_BLOCK, whole)]], offset + done)
                done += count
                if count == 0 or count % BLOCK:
                    break  # the end of the file; the rest is read, or found missing, in the ordinary way
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)
        return done

    def _blocks(self, key: str, size: int) -> Iterator[memoryview]:
        block = bytearray(min(size, 16 << 20))
        for offset in range(0, size, max(1, len(block))):
            view = memoryview(block)[: size - offset]
            self.read_into(key, offset, view)
            yield view

    @contextlib.contextmanager
    def _errors(self, key: str, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise translate(error, key=key, root=self.path, action=action) from error

    @contextlib.contextmanager
    def _temporary(self, key: str) -> Iterator[tuple[Path, Path]]:
        """``(temporary, target)`` in one folder that exists durably; the temporary is gone afterwards."""
        target = self._target(key)
        if target.is_dir():
            raise StorageError(f"{key} is a folder, it cannot be an object", where=str(target))
        temporary = target.with_name(_temporary_name(target.name))
        # An empty temporary file holds the folder: nobody can prune it away from here on.
        _again(lambda: self._hold(temporary))
        try:
            yield temporary, target
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            with contextlib.suppress(OSError):
                self._prune(target.parent)

    def _hold(self, temporary: Path) -> None:
        _make_folder(temporary.parent, self.path)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def _write_all(self, path: Path, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        with FileWriter(path, len(view), direct=False) as writer:
            writer.write(view, 0)
            writer.finish()

    def _prune(self, folder: Path) -> None:
        """Remove folders that became empty, as an object store has none."""
        while folder != self.path:
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                return
            folder = folder.parent


def _temporary_name(name: str) -> str:
    return f"{TEMPORARY}{secrets.token_hex(6)}-{name}"[:255]


def _again(step: Callable[[], T]) -> T:
    """Run ``step``, again when a folder vanished under it (``mkdir`` says then that it exists)."""
    for _ in range(_ATTEMPTS):
        try:
            return step()
        except (FileNotFoundError, FileExistsError):
            continue
    return step()


def _make_folder(folder: Path, root: Path) -> None:
    """Make ``folder`` and flush the entries that lead to it.

    A visible file in it means that its writer has flushed them already; whoever made the folder but
    has no file yet may not have, so an empty folder is flushed again.
    """
    missing = []
    above = folder
    while not above.exists():
        missing.append(above)
        above = above.parent
    folder.mkdir(parents=True, exist_ok=True)
    if not missing:
        with os.scandir(folder) as entries:
            if any(
                entry.is_file(follow_symlinks=False) and not entry.name.startswith(TEMPORARY)
                for entry in entries
            ):
                return
    chain = [folder, *folder.parents]
    inside = chain[: chain.index(root) + 1]
    for made in dict.fromkeys([*inside, *missing]):
        # Above the root we may lack the right to open; nothing of ours is lost there but its name.
        with contextlib.suppress(PermissionError):
            _sync_folder(made.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # filesystems that cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def _link_no_replace(source: Path, target: Path) -> bool:
    """Give ``source`` the name ``target`` unless that exists; whether it did."""
    try:
        os.link(source, target)
    except FileExistsError:
        # A network filesystem may repeat a request that had succeeded: then both names are one file.
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.lstat(source), os.lstat(target))
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return rename_no_replace(source, target)
    return True


def _remove_tree(folder: Path) -> None:
    for below, folders, files in os.walk(folder, topdown=False):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(Path(below, name))
        for name in folders:
            path = Path(below, name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path) if path.is_symlink() else os.rmdir(path)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(folder)


def _wrong_size(key: str, size: int, given: str) -> StorageError:
    return StorageError(
        f"the upload of {key} was announced with {size} bytes and gave {given}",
        code="S307",
        where=key,
        expected=f"chunks of {size} bytes in all",
        next_step="serai explain S307",
    )
