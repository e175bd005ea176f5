"""The places that the contract is tried on: a folder, an S3 server, Azure's emulator."""

from __future__ import annotations

import http.client
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.needs import azurite, needs_azurite
from tests.storage.servers import FaultyProxy, azurite_server, moto_server

from serai.storage import Storage, open_storage

S3_KEYS = {"access_key_id": "AKIDFORTESTS", "secret_access_key": "a-secret-of-the-tests"}
# The emulator's account and key are fixed and published in its manual.
AZURE_KEYS = {
    "account_name": "devstoreaccount1",
    "account_key": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
}


@pytest.fixture(scope="session")
def s3() -> Iterator[int]:
    """Port of an S3 server with the bucket ``bucket``."""
    with moto_server() as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("PUT", "/bucket")
        assert connection.getresponse().status == 200
        connection.close()
        yield port


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoint of Azure's emulator with the container ``container``."""
    program = azurite()
    assert program is not None
    with azurite_server(program, tmp_path_factory.mktemp("azurite")) as port:
        endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
        create_container(endpoint)
        yield endpoint


def create_container(endpoint: str) -> None:
    """obstore makes no containers, so the one request is signed here (Azure's shared key)."""
    import base64
    import hashlib
    import hmac
    from email.utils import formatdate
    from urllib.parse import urlsplit

    host = urlsplit(endpoint).netloc
    date, version = formatdate(usegmt=True), "2021-08-06"
    text = (
        f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n"
        "/devstoreaccount1/devstoreaccount1/container\nrestype:container"
    )
    key = base64.b64decode(AZURE_KEYS["account_key"])
    signature = base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request(
        "PUT",
        "/devstoreaccount1/container?restype=container",
        headers={
            "x-ms-date": date,
            "x-ms-version": version,
            "Authorization": f"SharedKey devstoreaccount1:{signature}",
            "Content-Length": "0",
        },
    )
    answer = connection.getresponse()
    assert answer.status == 201, answer.read()
    connection.close()


def s3_storage(endpoint: str, **options: Any) -> Storage:
    """A fresh root in the S3 server at ``endpoint``."""
    url = f"s3://bucket/{uuid.uuid4().hex}"
    return open_storage(
        url,
        **{
            "endpoint": endpoint,
            "region": "us-east-1",
            "credentials": S3_KEYS,
            "part_size": 5 << 20,
            **options,
        },
    )


@pytest.fixture
def proxy(s3: int) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3) as faulty:
        yield faulty


# To try the contract on a store of your own: SERAI_TEST_STORAGE=s3://bucket/prefix?endpoint=... with its
# credentials in the environment. What the tests leave lies below that prefix.
OWN_STORE = os.environ.get("SERAI_TEST_STORAGE")
KINDS = ["local", "s3", pytest.param("azure", marks=needs_azurite), *(["own"] if OWN_STORE else [])]


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty storage of each kind."""
    if request.param == "own":
        assert OWN_STORE is not None
        root, found, query = OWN_STORE.partition("?")
        return open_storage(f"{root}/{uuid.uuid4().hex}{found}{query}", part_size=5 << 20)
    if request.param == "local":
        return open_storage(tmp_path / "root")
    if request.param == "s3":
        return s3_storage(f"http://127.0.0.1:{request.getfixturevalue('s3')}")
    endpoint = request.getfixturevalue("azure")
    return open_storage(
        f"az://container/{uuid.uuid4().hex}", endpoint=endpoint, credentials=AZURE_KEYS, part_size=5 << 20
    )
