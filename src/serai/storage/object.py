"""Storage in a bucket: S3 and what speaks like it, Azure Blob, Google Cloud Storage (over obstore)."""

from __future__ import annotations

import builtins
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from serai.errors import NotFoundInStorage, StorageError, StorageTransient
from serai.storage._cloud import failure, parse_location, status_of
from serai.storage._retry import Retry
from serai.storage.base import Entry, Storage
from serai.storage.keys import check_folder, check_key, check_prefix

__all__ = ["ObjectStorage"]

_PART = 16 << 20
_MOST_PARTS = 10_000  # S3's limit; Azure's is 50,000
_COPY_LIMIT = 5 << 30  # S3 copies no larger object in one request
_FIRST_CONTACT = 20.0
_DELETES = 1000

T = TypeVar("T")


class ObjectStorage(Storage):
    """Objects below ``scheme://bucket/prefix``.

    A request that fails in a way that may pass (5xx, 429, time-out, broken connection) is repeated with
    growing, fully jittered pauses until ``deadline`` seconds are over; a store that has never answered
    at all is given up after 20 s, because then the address is more likely wrong than the network slow.
    Credentials come from the environment (and AWS's profile files), never from the URL.

    Args:
        url: ``s3://bucket/prefix?endpoint=https://host:9000&region=eu-west-1``.
        part_size: bytes of one part of a multipart upload and of one ranged read.
        concurrency: requests at once for one ``upload`` or ``read_into``.
        options: the query's options as keywords (``endpoint``, ``region``, ``path_style``,
            ``bulk_delete``, ``account``, ``anonymous``, ``deadline``, ``timeout``), and ``credentials``:
            a mapping with obstore's own names, such as ``access_key_id``.
    """

    def __init__(
        self,
        url: str,
        *,
        part_size: int = _PART,
        concurrency: int = 8,
        retry: Retry | None = None,
        **options: Any,
    ) -> None:
        self._location = parse_location(url, **options)
        self.url = self._location.url
        self._part = part_size
        self._concurrency = max(1, concurrency)
        self._retry = retry or Retry(deadline=self._location.deadline)
        self._answered = False
        self._bucket_seen = False
        # Single requests are repeated here, where it is known whether the first may have succeeded;
        # the parts of a multipart upload are repeated by obstore, which still holds their bytes.
        self._once = self._location.client(retries=0)
        self._stream = self._location.client(retries=10)

    def __repr__(self) -> str:
        return f"ObjectStorage({self.url!r})"

    # Reading

    def size(self, key: str) -> int:
        import obstore

        check_key(key)
        try:
            return int(self._ask("read", key, lambda: obstore.head(self._once, key))["size"])
        except NotFoundInStorage:
            # HEAD has no body to say that it is the bucket that is missing; a listing says so.
            if not self._bucket_seen:
                self._ask("list", "", lambda: obstore.list_with_delimiter(self._once, prefix=f"{key}/"))
            raise

    def read(self, key: str) -> bytes:
        import obstore

        check_key(key)

        def whole() -> bytes | int:
            found = obstore.get(self._once, key)
            size = int(found.meta["size"])
            return size if size > 4 * self._part else bytes(found.bytes())

        # One request sees one version of the object, where size-then-read could see two.
        answer = self._ask("read", key, whole)
        if isinstance(answer, bytes):
            return answer
        data = bytearray(answer)
        self.read_into(key, 0, memoryview(data))
        return bytes(data)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        import obstore

        check_key(key)
        view = buffer.cast("B")
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")

        def fill(begin: int) -> None:
            part = view[begin : begin + self._part]
            data = self._ask(
                "read",
                key,
                lambda: obstore.get_range(self._once, key, start=offset + begin, length=len(part)),
            )
            if len(data) != len(part):
                raise StorageError(
                    f"{key} ends at byte {offset + begin + len(data)}",
                    code="S307",
                    where=f"{self.url_of(key)} at byte {offset}",
                    expected=f"{len(view)} bytes from offset {offset}",
                    next_step="serai ckpt verify: the object was cut short",
                )
            part[:] = memoryview(data)

        begins = range(0, len(view), self._part)
        if len(begins) <= 1:
            for begin in begins:
                fill(begin)
            return
        with ThreadPoolExecutor(min(self._concurrency, len(begins)), thread_name_prefix="serai-read") as pool:
            futures = [pool.submit(fill, begin) for begin in begins]
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()

    def list(self, prefix: str = "") -> Iterator[Entry]:
        import obstore

        check_prefix(prefix)
        folder = prefix.rpartition("/")[0]
        found = self._ask(
            "list", folder, lambda: obstore.list(self._once, prefix=folder or None, chunk_size=1000).collect()
        )
        for entry in found:
            if entry["path"].startswith(prefix):
                yield Entry(entry["path"], int(entry["size"]))

    def list_folders(self, prefix: str = "") -> builtins.list[str]:
        import obstore

        folder = check_folder(prefix)[:-1] if prefix else ""
        found = self._ask(
            "list", folder, lambda: obstore.list_with_delimiter(self._once, prefix=folder or None)
        )
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    # Writing

    def put(self, key: str, data: bytes | memoryview) -> None:
        import obstore

        check_key(key)
        body = bytes(data)
        self._ask("write", key, lambda: obstore.put(self._once, key, body, use_multipart=False))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Also ``True`` when an earlier try of this call had succeeded without us hearing of it.

        That is told from the content, so two writers that may meet must write different bytes.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        check_key(key)
        unheard = False

        def attempt(_: int) -> bool:
            nonlocal unheard
            try:
                self._translate(
                    "write",
                    key,
                    lambda: obstore.put(self._once, key, data, mode="create", use_multipart=False),
                )
                return True
            except (AlreadyExistsError, PreconditionError):
                pass
            except StorageTransient:
                unheard = True
                raise
            try:
                if unheard:
                    stored = self._translate("read", key, lambda: bytes(obstore.get(self._once, key).bytes()))
                    return stored == data
                self._translate("read", key, lambda: obstore.head(self._once, key))
                return False
            except NotFoundInStorage:
                # 409: another conditional write was under way, and it did not come through either.
                raise StorageTransient(
                    f"two writers of {key} hindered each other", where=self.url_of(key)
                ) from None

        return self._retry(attempt, deadline=self._deadline())

    def upload(self, key: str, chunks: Iterable[memoryview], size: int, *, stable: bool = False) -> None:
        import obstore

        check_key(key)
        if size <= self._part:
            self.put(key, b"".join(bytes(part) for part in self._counted(key, chunks, size)))
            return
        part = max(self._part, -(-size // _MOST_PARTS))

        broken: builtins.list[BaseException] = []

        def source() -> Iterator[bytes | memoryview]:
            try:
                for chunk in self._counted(key, chunks, size):
                    # A copy, so that the iterable may refill its buffer while parts are on their way.
                    yield chunk if stable else bytes(chunk)
            except BaseException as error:
                broken.append(error)
                raise

        def send() -> None:
            obstore.put(
                self._stream,
                key,
                source(),
                use_multipart=True,
                chunk_size=part,
                max_concurrency=self._concurrency,
            )

        try:
            self._translate("write", key, send)
        except Exception:
            # The source's own failure ended the upload (obstore has aborted it): that one is told.
            if broken:
                raise broken[0] from None
            raise
        self.verify_size(key, size)

    def copy(self, key: str, new_key: str) -> None:
        import obstore

        check_key(key)
        check_key(new_key)
        size = self.size(key)
        if key == new_key:
            return  # S3 refuses to copy an object onto itself; it is there already
        if self._location.scheme == "s3" and size > _COPY_LIMIT:
            self.upload(new_key, self._blocks(key, size), size)
            return
        try:
            self._ask("copy", key, lambda: obstore.copy(self._once, key, new_key))
        except NotFoundInStorage:
            raise NotFoundInStorage(f"there is no {key} to copy", where=self.url_of(key)) from None
        self.verify_size(new_key, size)

    def delete(self, key: str) -> None:
        self._delete([check_key(key)])

    def delete_folder(self, prefix: str) -> None:
        keys = [entry.key for entry in self.list(check_folder(prefix))]
        for begin in range(0, len(keys), _DELETES):
            self._delete(keys[begin : begin + _DELETES])

    def probe_conditional_put(self) -> bool:
        key = f"probe-{secrets.token_hex(8)}"
        try:
            return self.put_if_absent(key, b"first") and not self.put_if_absent(key, b"second")
        except StorageError as error:
            if type(error) is StorageError and error.code == StorageError.default_code:
                return False  # the store refuses the condition: 501, or 400
            raise
        finally:
            self.delete(key)

    # Parts

    def _delete(self, keys: builtins.list[str]) -> None:
        import obstore

        try:
            self._ask("delete", keys[0], lambda: obstore.delete(self._once, keys))
        except NotFoundInStorage:
            if len(keys) > 1:
                for key in keys:
                    self._delete([key])

    def _counted(self, key: str, chunks: Iterable[memoryview], size: int) -> Iterator[memoryview]:
        """The chunks, when they are ``size`` bytes in all; an error instead of the last one otherwise."""
        done = 0
        for chunk in chunks:
            view = chunk.cast("B")
            done += len(view)
            if done > size:
                break
            yield view
        if done != size:
            raise StorageError(
                f"the upload of {key} was announced with {size} bytes and gave "
                + (str(done) if done < size else f"more than {done - 1}"),
                code="S307",
                where=key,
                expected=f"chunks of {size} bytes in all",
                next_step="serai explain S307",
            )

    def _blocks(self, key: str, size: int) -> Iterator[memoryview]:
        block = bytearray(min(size, 4 * self._part))
        for offset in range(0, size, len(block)):
            view = memoryview(block)[: size - offset]
            self.read_into(key, offset, view)
            yield view

    def _deadline(self) -> float:
        return self._retry.deadline if self._answered else min(_FIRST_CONTACT, self._retry.deadline)

    def _ask(self, action: str, key: str, request: Callable[[], T]) -> T:
        return self._retry(lambda _: self._translate(action, key, request), deadline=self._deadline())

    def _translate(self, action: str, key: str, request: Callable[[], T]) -> T:
        """One try. What obstore raises becomes ours; its own text, which may hold secrets, is dropped."""
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        try:
            answer = request()
        except (AlreadyExistsError, PreconditionError):
            self._answered = True
            raise
        except (BaseError, OSError) as error:
            translated = failure(error, self._location, key, action, answered=self._answered)
            self._answered |= status_of(error) is not None
            raise translated from None
        self._answered = self._bucket_seen = True
        return answer
