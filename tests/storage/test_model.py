"""Any sequence of operations leaves a storage as it leaves a dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tests.storage.conftest import s3_storage

from serai.errors import NotFoundInStorage
from serai.storage import Storage, open_storage
from serai.storage.base import Entry

# Few names, so that operations meet; folders and objects have different ones, as a disk needs it.
FOLDERS = st.lists(st.sampled_from(["a", "ab", "step-1"]), max_size=3)
KEYS = st.builds(
    lambda folders, name: "/".join([*folders, name]), FOLDERS, st.sampled_from(["x", "y.json", "x y"])
)
DATA = st.binary(max_size=40)


class Model(RuleBasedStateMachine):
    def __init__(self, storage: Storage) -> None:
        super().__init__()
        self.storage = storage
        self.objects: dict[str, bytes] = {}

    @rule(key=KEYS, data=DATA)
    def put(self, key: str, data: bytes) -> None:
        self.storage.put(key, data)
        self.objects[key] = data

    @rule(key=KEYS, data=DATA)
    def put_if_absent(self, key: str, data: bytes) -> None:
        assert self.storage.put_if_absent(key, data) == (key not in self.objects)
        self.objects.setdefault(key, data)

    @rule(key=KEYS, data=DATA, cut=st.integers(0, 40), stable=st.booleans())
    def upload(self, key: str, data: bytes, cut: int, stable: bool) -> None:
        chunks = [memoryview(data)[:cut], memoryview(data)[cut:]]
        self.storage.upload(key, chunks, len(data), stable=stable)
        self.objects[key] = data

    @rule(key=KEYS, new_key=KEYS)
    def copy(self, key: str, new_key: str) -> None:
        if key in self.objects:
            self.storage.copy(key, new_key)
            self.objects[new_key] = self.objects[key]
        else:
            with pytest.raises(NotFoundInStorage):
                self.storage.copy(key, new_key)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.storage.delete(key)
        self.objects.pop(key, None)

    @rule(folders=FOLDERS.filter(bool))
    def delete_folder(self, folders: list[str]) -> None:
        prefix = "/".join(folders) + "/"
        self.storage.delete_folder(prefix)
        self.objects = {key: data for key, data in self.objects.items() if not key.startswith(prefix)}

    @rule(key=KEYS, offset=st.integers(0, 10), length=st.integers(1, 10))
    def read_range(self, key: str, offset: int, length: int) -> None:
        if offset + length <= len(self.objects.get(key, b"")):
            buffer = bytearray(length)
            self.storage.read_into(key, offset, memoryview(buffer))
            assert buffer == self.objects[key][offset : offset + length]

    @rule(prefix=st.one_of(KEYS, st.sampled_from(["", "a", "a/", "ab/", "step-1/a"])))
    def list_prefix(self, prefix: str) -> None:
        wanted = {Entry(key, len(data)) for key, data in self.objects.items() if key.startswith(prefix)}
        found = list(self.storage.list(prefix))
        assert set(found) == wanted
        assert len(found) == len(wanted)

    @rule(folders=FOLDERS)
    def list_folders(self, folders: list[str]) -> None:
        prefix = "".join(f"{name}/" for name in folders)
        inside = [key[len(prefix) :] for key in self.objects if key.startswith(prefix)]
        assert sorted(self.storage.list_folders(prefix)) == sorted(
            {k.split("/")[0] for k in inside if "/" in k}
        )

    @invariant()
    def same_objects(self) -> None:
        assert {entry.key for entry in self.storage.list()} == set(self.objects)


def run(make: object, examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        make,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


class OnDisk(Model):
    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="serai-model-"))
        super().__init__(open_storage(self.root))

    def teardown(self) -> None:
        try:
            for key, data in self.objects.items():
                assert self.storage.read(key) == data
            # Nothing is left over: no temporary file, no empty folder.
            files = {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}
            assert files == set(self.objects)
            assert all(any(path.iterdir()) for path in self.root.rglob("*") if path.is_dir())
        finally:
            shutil.rmtree(self.root)


def test_a_folder_is_a_dictionary() -> None:
    run(OnDisk, 80)


def test_a_bucket_is_a_dictionary(s3: int) -> None:
    class InBucket(Model):
        def __init__(self) -> None:
            super().__init__(s3_storage(f"http://127.0.0.1:{s3}", part_size=5 << 20))

        def teardown(self) -> None:
            for key, data in self.objects.items():
                assert self.storage.read(key) == data

    run(InBucket, 6)
