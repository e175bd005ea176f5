"""A stranger's checkpoint can be refused, and nothing else; sockets are private; secrets stay where they are."""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.needs import needs_root

import serai
from serai.checkpoint.agent.client import canonical_root, ensure_agent
from serai.checkpoint.agent.protocol import socket_path
from serai.checkpoint.format import MANIFEST, VALUES
from serai.checkpoint.hashing import hex_digest
from serai.errors import SeraiError, StorageError

SECRET = "sk-planted-secret-1234567890"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("stranger")
    before = os.environ.get("XDG_RUNTIME_DIR")
    (base / "run").mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(base / "run")
    try:
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with serai.Checkpointer(base / "root") as checkpointer:
            checkpointer.save(
                3,
                {
                    "model": model,
                    "optimizer": optimizer,
                    "rng": serai.RNG(),
                    "plain": {"a": [1, (2.5, b"x")]},
                },
            )
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before
    (base / "secret.txt").write_text(SECRET)
    return base


def sealed(document: dict[str, Any]) -> bytes:
    document.pop("checksum", None)
    body = json.dumps(document, separators=(",", ":")).encode()[:-1]
    return body + b',"checksum":"' + hex_digest(body).encode() + b'"}\n'


def rewrite(root: Path, manifest: dict[str, Any], values: bytes | None = None) -> None:
    (folder,) = root.glob("step-*")
    if values is not None:
        (folder / VALUES).write_bytes(values)
        manifest["values"]["bytes"] = len(values)
        manifest["values"]["digest"] = hex_digest(values)
    (folder / MANIFEST).write_bytes(sealed(manifest))


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def put(node: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


STRANGE = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 1, 1 << 31, 1 << 40, 1 << 62, 1 << 64, 1.5, "", "../../secret.txt", "/etc/passwd"]
    ),
    st.sampled_from(["shard", "float32", "object", "\0", "..", "$tensor", "0" * 10_000]),
    st.sampled_from([[], {}, [0], [[]], {"a": 1}, [1 << 40], [1 << 40, 1 << 40], {"$tensor": "nothing"}]),
    st.sampled_from(
        [
            {"$numpy": ["O", [], "AAAA"]},
            {"$numpy": ["<f8", [1 << 40], ""]},
            {"$dtype": "nn"},
            {"$dtype": "load"},
            {"$device": "cuda:99"},
            {"$module": {"path": ["model"]}},
            {"$optimizer": {"path": [], "param_groups": 3}},
            {"$bytes": "!!"},
            {"$set": [[1]]},
            {"$dict": [[[1], 2]]},
            {"$counter": [["a", "b"]]},
        ]
    ),
)


@settings(deadline=5000, max_examples=120, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_strangers_files_are_loaded_or_refused_and_nothing_else(
    pristine: Path, data: st.DataObject
) -> None:
    root = pristine / "fuzzed"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(pristine / "root", root)
    (folder,) = root.glob("step-*")
    manifest = json.loads((folder / MANIFEST).read_bytes())
    values = json.loads((folder / VALUES).read_bytes())
    target = data.draw(st.sampled_from([manifest, values]))
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(places(target)))
        put(target, path, copy.deepcopy(data.draw(STRANGE)))
        if target is manifest and not isinstance(manifest.get("values"), dict):
            break
    try:
        rewrite(root, manifest, json.dumps(values).encode() if target is values else None)
    except TypeError:
        return
    live = {
        "model": torch.nn.Linear(4, 3),
        "rng": serai.RNG(),
        "plain": {"a": [0, (0.0, b"")]},
    }
    for act in (lambda: serai.load(root), lambda: restored(root, live)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = act()
            except SeraiError:
                continue
        assert SECRET not in repr(found)


def restored(root: Path, live: dict[str, Any]) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    from serai.checkpoint.ranks import Ranks
    from serai.checkpoint.restore import restore
    from serai.storage.local import LocalStorage

    with ThreadPoolExecutor(1) as pool:
        restore(
            live,
            ranks=Ranks(),
            agent=None,
            storages=[("durable", LocalStorage(root))],
            step=None,
            strict=False,
            pool=pool,
        )
    return live["plain"]


def test_a_small_file_that_claims_a_tebibyte_costs_no_memory(pristine: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(pristine / "root", root)
    (folder,) = root.glob("step-*")
    manifest = json.loads((folder / MANIFEST).read_bytes())
    size = 8 << 30  # what a machine would hand out without a word
    entry = manifest["files"][0]
    name = next(iter(manifest["tensors"]))
    tensor = manifest["tensors"][name]
    tensor |= {
        "dtype": "uint8",
        "shape": [size],
        "pieces": [{"file": 0, "start": 0, "offsets": [0], "lengths": [size]}],
    }
    entry |= {"bytes": size, "chunks": ["0" * 32] * (size // entry["chunk_bytes"])}
    rewrite(root, manifest)
    script = (
        "import resource, sys, serai\n"
        "from serai.errors import SeraiError\n"
        "import torch\n"
        "held = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 30), held + (1 << 30)))\n"
        "try:\n    serai.load(sys.argv[1])\n"
        "except SeraiError as error:\n    print(error.code, error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(root)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("S402")
    assert "is cut short" in done.stdout


@pytest.mark.parametrize(
    "url",
    [
        f"s3://key:{SECRET}@bucket/run",
        f"s3://bucket/run?secret_access_key={SECRET}",
        f"az://container/run?sas_token={SECRET}",
        f"gs://bucket/run?endpoint=https://me:{SECRET}@host",
    ],
)
def test_a_url_with_a_secret_is_refused_before_anybody_sees_it(url: str, private_agents: Path) -> None:
    with pytest.raises(StorageError) as caught:
        serai.Checkpointer(url)
    assert caught.value.code == "S310"
    assert SECRET not in str(caught.value)
    assert SECRET not in json.dumps(caught.value.to_json())
    with pytest.raises(StorageError):
        ensure_agent("/tmp/somewhere", local=url)
    assert [path for path in private_agents.rglob("*") if path.is_file()] == []


def test_the_socket_and_its_folder_are_the_users_alone(tmp_path: Path) -> None:
    path = ensure_agent(tmp_path)
    assert path == socket_path(canonical_root(tmp_path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.stat().st_uid == os.getuid()
    for other in path.parent.iterdir():
        assert stat.S_IMODE(other.stat().st_mode) & 0o077 == 0 or other.suffix == ".log", other


@needs_root
def test_another_user_cannot_talk_to_the_agent(tmp_path: Path, private_agents: Path) -> None:
    path = ensure_agent(tmp_path)
    script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])"
    command = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "/usr/bin/python3",
        "-c",
        script,
        str(path),
    ]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert refused.returncode != 0
    assert "PermissionError" in refused.stderr
    with socket.socket(socket.AF_UNIX) as mine:
        mine.connect(str(path))
