"""Object stores: faults on the way, secrets, addresses. The contract is in test_contract.py."""

from __future__ import annotations

import http.client
import logging
import os
import socket
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from tests.storage.conftest import S3_KEYS, s3_storage
from tests.storage.servers import FaultyProxy, free_port

from serai.errors import (
    NotFoundInStorage,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageTransient,
    StorageUnreachable,
    Unreachable,
)
from serai.storage import open_storage
from serai.storage._cloud import Location, failure, parse_location
from serai.storage._retry import Retry
from serai.storage._scrub import scrub
from serai.storage.object import ObjectStorage

SECRET = "wJalrXUtnFEMI-K7MDENG-bPxRfiCYEXAMPLEKEY"


class Clock:
    """Time that only passes in ``sleep``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def retry(self, deadline: float, **options: Any) -> Retry:
        return Retry(deadline=deadline, sleep=self.sleep, clock=lambda: self.now, **options)


def behind(proxy: FaultyProxy, **options: Any) -> ObjectStorage:
    storage = s3_storage(proxy.endpoint, **{"retry": Retry(deadline=20, first=0.01), **options})
    assert isinstance(storage, ObjectStorage)
    return storage


# Backoff


def test_pauses_grow_are_jittered_and_end_at_the_deadline() -> None:
    clock = Clock()
    bounds: list[float] = []

    def uniform(low: float, high: float) -> float:
        assert low == 0
        bounds.append(high)
        return high

    def fail(_: int) -> None:
        raise StorageTransient("no")

    with pytest.raises(StorageTransient, match=r"after 9 tries") as caught:
        clock.retry(30, uniform=uniform)(fail)
    assert bounds[:8] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10]
    assert clock.pauses == bounds[:8]
    assert clock.now <= 30
    assert "after 9 tries" in str(caught.value)


def test_two_clients_do_not_pause_alike() -> None:
    pauses = []
    for _ in range(2):
        clock = Clock()

        def fail(_: int) -> None:
            raise StorageTransient("no")

        with pytest.raises(StorageTransient):
            clock.retry(5)(fail)
        pauses.append(clock.pauses)
    assert pauses[0] != pauses[1]


def test_lasting_errors_are_not_repeated() -> None:
    tries = []

    def fail(number: int) -> None:
        tries.append(number)
        raise StorageDenied("no")

    with pytest.raises(StorageDenied):
        Clock().retry(100)(fail)
    assert tries == [0]


# Faults on the way


@pytest.mark.parametrize("fault", ["500", "503", "429", "reset", "lost"])
def test_every_operation_survives_passing_faults(proxy: FaultyProxy, fault: str) -> None:
    storage = behind(proxy)
    data = os.urandom(70_000)

    def survives(act: Any) -> Any:
        proxy.plan(fault, fault)
        result = act()
        assert proxy.left == 0
        return result

    survives(lambda: storage.put("a/k", data))
    assert survives(lambda: storage.read("a/k")) == data
    assert survives(lambda: storage.size("a/k")) == len(data)
    buffer = bytearray(100)
    survives(lambda: storage.read_into("a/k", 500, memoryview(buffer)))
    assert buffer == data[500:600]
    assert [entry.key for entry in survives(lambda: list(storage.list()))] == ["a/k"]
    assert survives(storage.list_folders) == ["a"]
    assert survives(lambda: storage.put_if_absent("a/once", b"mine")) is True
    assert survives(lambda: storage.put_if_absent("a/once", b"other")) is False
    assert storage.read("a/once") == b"mine"
    survives(lambda: storage.copy("a/k", "b/k"))
    assert storage.read("b/k") == data
    survives(lambda: storage.delete("a/k"))
    survives(lambda: storage.delete_folder("a/"))
    assert [entry.key for entry in storage.list()] == ["b/k"]


def test_a_body_that_ends_early_is_read_again(proxy: FaultyProxy) -> None:
    storage = behind(proxy)
    data = os.urandom(200_000)
    storage.put("k", data)
    proxy.plan("short", "short", method="GET")
    assert storage.read("k") == data
    proxy.plan("short", method="GET")
    buffer = bytearray(len(data))
    storage.read_into("k", 0, memoryview(buffer))
    assert buffer == data
    assert proxy.left == 0


def test_a_request_that_hangs_is_given_up_and_repeated(proxy: FaultyProxy) -> None:
    storage = behind(proxy, timeout=0.5)
    storage.put("k", b"1")
    proxy.plan("hang", "hang")
    begin = time.monotonic()
    assert storage.read("k") == b"1"
    assert 1.0 <= time.monotonic() - begin < 10


@pytest.mark.parametrize("fault", ["500", "503", "reset", "lost"])
def test_a_multipart_upload_survives_passing_faults(proxy: FaultyProxy, fault: str) -> None:
    storage = behind(proxy)
    data = os.urandom(12 << 20)
    proxy.plan(fault, fault, method="PUT")
    storage.upload("k", [memoryview(data)], len(data))
    assert proxy.left == 0
    assert [method for method, _, _ in proxy.seen].count("PUT") == 5
    assert storage.read("k") == data


def test_a_multipart_upload_that_fails_shows_nothing_and_leaves_no_parts(proxy: FaultyProxy, s3: int) -> None:
    storage = behind(proxy, deadline=1)

    def chunks():  # type: ignore[no-untyped-def]
        yield memoryview(bytes(6 << 20))
        raise OSError(5, "the source's disk broke")

    with pytest.raises(OSError, match="the source's disk broke"):
        storage.upload("broken", chunks(), 12 << 20)
    assert list(storage.list()) == []
    connection = http.client.HTTPConnection("127.0.0.1", s3, timeout=30)
    connection.request("GET", "/bucket?uploads")
    assert b"<Upload>" not in connection.getresponse().read()
    connection.close()


@pytest.mark.parametrize("fault", ["500", "503", "reset"])
def test_lasting_faults_end_inside_the_deadline(proxy: FaultyProxy, fault: str) -> None:
    storage = behind(proxy, retry=Retry(deadline=0.6, first=0.05), deadline=0.6)
    storage.put("k", b"1")
    proxy.always = fault
    big = memoryview(bytes(6 << 20))
    for act in (
        lambda: storage.put("k", b"2"),
        lambda: storage.put_if_absent("n", b"2"),
        lambda: storage.read("k"),
        lambda: storage.upload("k", [big], len(big)),
    ):
        begin = time.monotonic()
        with pytest.raises(StorageTransient) as caught:
            act()
        assert time.monotonic() - begin < 3
        assert proxy.endpoint in str(caught.value)
        assert isinstance(caught.value, StorageUnreachable) == (fault == "reset")
    proxy.always = None
    assert storage.read("k") == b"1"
    assert [entry.key for entry in storage.list()] == ["k"]


# put-if-absent


def test_a_create_whose_answer_was_lost_counts_as_ours(proxy: FaultyProxy) -> None:
    storage = behind(proxy)
    proxy.plan("lost", method="PUT")
    assert storage.put_if_absent("attempts/1", b"writer A") is True
    assert [fault for method, _, fault in proxy.seen if method == "PUT"] == ["lost", None]


def test_a_create_that_lost_against_another_while_unheard(proxy: FaultyProxy) -> None:
    storage = behind(proxy)
    other = s3_storage(f"http://127.0.0.1:{proxy.upstream}")
    other._location = storage._location  # type: ignore[attr-defined]
    other._once = storage._location.client(retries=0)  # type: ignore[attr-defined]
    real = storage._retry.sleep

    def sleep(seconds: float) -> None:
        # While A waits to try again, B creates the object.
        assert other.put_if_absent("attempts/1", b"writer B") is True
        real(seconds)

    storage._retry.sleep = sleep
    proxy.plan("reset", method="PUT")
    assert storage.put_if_absent("attempts/1", b"writer A") is False
    assert storage.read("attempts/1") == b"writer B"


class Ignoring(FaultyProxy):
    """A store that does not know conditional puts."""

    def handle(self, request: Any) -> None:
        del request.headers["If-None-Match"]
        super().handle(request)


def test_a_store_that_ignores_the_condition_is_found_out(s3: int) -> None:
    with Ignoring(s3) as proxy:
        storage = behind(proxy)
        assert storage.probe_conditional_put() is False
        assert list(storage.list()) == []


@pytest.mark.parametrize("status", ["501", "400"])
def test_a_store_that_refuses_the_condition_is_found_out(proxy: FaultyProxy, status: str) -> None:
    storage = behind(proxy)
    proxy.plan(status, method="PUT")
    assert storage.probe_conditional_put() is False


def test_a_store_that_cannot_be_asked_is_no_store_without_conditions(proxy: FaultyProxy) -> None:
    storage = behind(proxy)
    proxy.plan("403", method="PUT")
    with pytest.raises(StorageDenied):
        storage.probe_conditional_put()


def test_a_conflict_without_a_winner_is_tried_again(proxy: FaultyProxy) -> None:
    storage = behind(proxy)
    proxy.plan("409", method="PUT")
    assert storage.put_if_absent("k", b"1") is True


# Errors


def test_a_missing_bucket(s3: int) -> None:
    storage = open_storage(
        "s3://no-such-bucket/x", endpoint=f"http://127.0.0.1:{s3}", region="us-east-1", credentials=S3_KEYS
    )
    for act in (
        lambda: storage.put("k", b"1"),
        lambda: storage.size("k"),
        lambda: storage.read("k"),
        lambda: list(storage.list()),
        lambda: storage.upload("k", [memoryview(bytes(20 << 20))], 20 << 20),
    ):
        with pytest.raises(StorageError, match="there is no bucket 'no-such-bucket'") as caught:
            act()
        assert caught.value.code == "S309"


@pytest.mark.parametrize(
    ("status", "kind"), [("403", StorageDenied), ("401", StorageDenied), ("507", StorageFull)]
)
def test_answers_that_no_retry_changes(proxy: FaultyProxy, status: str, kind: type[StorageError]) -> None:
    storage = behind(proxy)
    proxy.plan(status)
    with pytest.raises(kind) as caught:
        storage.put("k", b"1")
    assert type(caught.value) is kind
    assert len(proxy.seen) == 1
    assert f"HTTP {status}" in str(caught.value)


def test_quota_is_a_full_storage_whatever_the_status() -> None:
    location = Location("s3", "bucket", "x")
    text = "Server returned non-2xx status code: 403 Forbidden: <Error><Code>QuotaExceeded</Code></Error>"
    assert isinstance(failure(OSError(text), location, "k", "write", answered=True), StorageFull)


def test_a_closed_port_is_unreachable_soon_and_named() -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    clock = Clock()
    storage = s3_storage(endpoint, retry=clock.retry(120))
    with pytest.raises(StorageUnreachable, match="Connection refused") as caught:
        storage.put("k", b"1")
    assert clock.now <= 20  # a store that never answered is not waited for as one that did
    error = caught.value
    assert endpoint in str(error)
    assert error.code == "S311"
    assert error.exit_code == 69
    assert isinstance(error, Unreachable)


def test_a_port_that_never_answers_is_unreachable_within_the_deadline() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        storage = s3_storage(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3, deadline=1)
        begin = time.monotonic()
        with pytest.raises(StorageUnreachable, match="does not answer: timed out"):
            storage.put("k", b"1")
        assert time.monotonic() - begin < 5


def test_no_credentials_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    location = parse_location("s3://bucket/x")
    text = "Error performing PUT http://169.254.169.254/latest/api/token in 3s - HTTP error: error sending request"
    error = failure(OSError(text), location, "k", "write", answered=False)
    assert isinstance(error, StorageDenied)
    assert "AWS_ACCESS_KEY_ID" in str(error)
    # With credentials once seen, the machine's role is only out of reach for a moment.
    assert isinstance(failure(OSError(text), location, "k", "write", answered=True), StorageTransient)


def test_keys_of_a_profile_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, proxy: FaultyProxy
) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        "[work]\naws_access_key_id = AKIDOFWORK\naws_secret_access_key = of-the-profile\n"
    )
    (tmp_path / ".aws/config").write_text("[profile work]\nregion = eu-west-7\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_PROFILE", "work")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    headers: list[str] = []
    handle = proxy.handle

    def watch(request: Any) -> None:
        headers.append(request.headers["Authorization"])
        handle(request)

    monkeypatch.setattr(proxy, "handle", watch)
    open_storage("s3://bucket/profile", endpoint=proxy.endpoint).put("k", b"1")
    assert "Credential=AKIDOFWORK/" in headers[0]
    assert "/eu-west-7/s3/" in headers[0]


# Secrets


def test_no_secret_in_errors_urls_or_logs(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET)
    keys = {"access_key_id": "AKIDSECRET", "secret_access_key": SECRET, "session_token": SECRET}
    storage = open_storage(
        "s3://bucket/x",
        endpoint=proxy.endpoint,
        region="us-east-1",
        credentials=keys,
        retry=Retry(deadline=0.3, first=0.05),
    )
    texts = [storage.url, repr(storage), repr(storage._location)]  # type: ignore[attr-defined]
    handle = proxy.handle

    def echo(request: Any) -> None:
        # A store that repeats what it was told, as S3 does when a signature is wrong.
        document = f"<Error><Code>Denied</Code><Message>{SECRET} {request.headers}</Message></Error>".encode()
        request.rfile.read(int(request.headers.get("Content-Length") or 0))
        request.send_response(int(proxy.always or 403))
        request.send_header("Content-Length", str(len(document)))
        request.end_headers()
        request.wfile.write(document)

    for status in ("403", "400", "500"):
        monkeypatch.setattr(proxy, "handle", echo)
        proxy.always = status
        with pytest.raises(StorageError) as caught:
            storage.put("k", b"1")
        texts += ["".join(traceback.format_exception(caught.value)), str(caught.value.to_json())]
    monkeypatch.setattr(proxy, "handle", handle)
    texts.append(caplog.text)
    assert len(texts) == 10
    for text in texts:
        assert SECRET not in text
        assert "AWS4-HMAC" not in text


def test_a_sas_token_never_shows() -> None:
    location = parse_location(
        "az://container/x", account="acc", credentials={"sas_token": f"sv=1&sig={SECRET}"}
    )
    text = (
        f"Error performing PUT https://acc.blob.core.windows.net/container/x/k?sv=1&sig={SECRET}%3D in 1ms - "
        "Server returned non-2xx status code: 418 Teapot"
    )
    error = failure(OSError(text), location, "k", "write", answered=True)
    assert SECRET not in str(error)
    text = f"Error performing PUT https://acc.blob.core.windows.net/x?sv=1&sig={SECRET}%3D - HTTP error: no"
    assert SECRET not in str(failure(OSError(text), location, "k", "write", answered=True))


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://user:pass@host/x", "https://***@host/x"),
        ("GET /x?sig=abc&sv=1", "GET /x?sig=***&sv=1"),
        ("/x?X-Amz-Signature=abc&X-Amz-Security-Token=de%2F&partNumber=2", None),
        ('"authorization": AWS4-HMAC-SHA256 Credential=A/B, Signature=c', '"authorization": ***'),
        ("the Authorization header was wrong", "the Authorization header was wrong"),
    ],
)
def test_scrubbing(text: str, clean: str | None) -> None:
    assert scrub(text) == (clean or "/x?X-Amz-Signature=***&X-Amz-Security-Token=***&partNumber=2")


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKID:{SECRET}@bucket/x",
        f"s3://bucket/x?secret_access_key={SECRET}",
        f"az://container/x?sv=2024&sig={SECRET}",
        f"s3://bucket/x?endpoint=https://user:{SECRET}@host",
    ],
)
def test_credentials_in_a_url_are_refused(url: str) -> None:
    with pytest.raises(StorageError, match="must not hold credentials") as caught:
        open_storage(url)
    assert caught.value.code == "S310"
    assert SECRET not in "".join(traceback.format_exception(caught.value))


# Addresses


def test_the_url_opens_the_same_root_again(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    first = open_storage(f"s3://bucket/run%20one/é/?endpoint={proxy.endpoint}&region=us-east-1&timeout=7")
    first.put("k", b"1")
    second = open_storage(first.url)
    assert second.url == first.url
    assert second.read("k") == b"1"
    assert second._location.timeout == 7  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("url", "code", "text"),
    [
        ("s3:///x", "S309", "names no bucket"),
        ("s3://bucket/x?endpiont=https://h", "S310", "perhaps you meant 'endpoint'"),
        ("gs://bucket/x?region=eu", "S310", "gs:// has no option 'region'"),
        ("s3://bucket/x?endpoint=host:9000", "S310", "is no http:// or https:// address"),
        ("s3://bucket/x?deadline=soon", "S310", "is no time"),
        ("s3://bucket/a/../b", "S305", "has the part '..'"),
    ],
)
def test_urls_that_are_wrong(url: str, code: str, text: str) -> None:
    with pytest.raises(StorageError, match=text.replace("?", r"\?")) as caught:
        open_storage(url)
    assert caught.value.code == code


def test_google_is_set_up_from_its_url() -> None:
    """Only the set-up: obstore cannot write to the emulator of Google's store that can be installed."""
    storage = open_storage("gs://bucket/run", anonymous=True)
    assert storage.url == "gs://bucket/run?anonymous=true"
    other = open_storage(
        "gs://bucket/run", endpoint=f"http://127.0.0.1:{free_port()}", anonymous=True, deadline=0.3
    )
    with pytest.raises(StorageUnreachable, match="Connection refused"):
        other.read("k")


# Sizes


def test_large_ranges_are_read_in_parts_at_once(proxy: FaultyProxy) -> None:
    storage = behind(proxy, part_size=5 << 20)
    data = os.urandom(23 << 20)
    storage.upload("k", [memoryview(data)], len(data))
    proxy.seen.clear()
    buffer = bytearray(len(data) - 100)
    storage.read_into("k", 100, memoryview(buffer))
    assert buffer == data[100:]
    assert len(proxy.seen) == 5
    assert storage.read("k") == data


def test_an_object_too_large_for_one_copy_goes_through_here(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serai.storage.object._COPY_LIMIT", 1000)
    storage = behind(proxy)
    data = os.urandom(5000)
    storage.put("k", data)
    storage.copy("k", "l")
    assert storage.read("l") == data


def test_a_size_that_the_store_does_not_confirm_is_an_error(
    proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = behind(proxy)
    monkeypatch.setattr(storage, "size", lambda key: 5)
    with pytest.raises(StorageError, match="has 5 bytes where"):
        storage.upload("k", [memoryview(bytes(6 << 20))], 6 << 20)


def test_reading_while_another_replaces_never_mixes(proxy: FaultyProxy) -> None:
    storage = behind(proxy)
    versions = [bytes([number]) * (1000 + 977 * number) for number in range(8)]
    storage.put("latest.json", versions[0])
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            for version in versions:
                storage.put("latest.json", version)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        for _ in range(60):
            assert storage.read("latest.json") in versions
    finally:
        stop.set()
        writer.join(30)


def test_missing_objects_cost_one_request_once_the_bucket_is_known(proxy: FaultyProxy) -> None:
    storage = behind(proxy)
    storage.put("k", b"1")
    proxy.seen.clear()
    with pytest.raises(NotFoundInStorage):
        storage.size("missing")
    assert len(proxy.seen) == 1
