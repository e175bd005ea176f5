"""torch's distributed checkpoint (DCP) folders, written and read in one process with no process group.

DCP's own reader unpickles its ``.metadata`` and its byte entries freely. Here only the classes that
describe tensors may come out of a pickle, and byte entries must load with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from serai.errors import CheckpointCorrupt, UnsafeObject

__all__ = ["DcpFolder", "read_dcp_tensors", "write_dcp"]

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "getattr"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Makes only what describes tensors; anything else in the file is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member_of_an_enum
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise UnsafeObject(
            f"the DCP metadata wants {module}.{name}",
            code="S437",
            where=".metadata",
            expected="only descriptions of tensors",
            next_step="do not load this folder with anything else unless you trust who wrote it",
        )


def _member_of_an_enum(owner: Any, name: str) -> Any:
    """Python pickles an enum's member by ``getattr``; nothing else may use it."""
    import enum

    if isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__:
        return owner[name]
    raise UnsafeObject(f"the DCP metadata wants the attribute {name!r}", code="S437", where=".metadata")


class _SafeReader(FileSystemReader):
    """Reads ``.metadata`` once, through the allow-list."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._known is None:
            path = self._folder / ".metadata"
            try:
                metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
                if not isinstance(metadata, Metadata):
                    raise TypeError(f"it holds a {type(metadata).__name__}")
            except UnsafeObject:
                raise
            except (OSError, pickle.UnpicklingError, EOFError, TypeError, ValueError, AttributeError, KeyError,
                    IndexError, ImportError) as error:  # fmt: skip
                raise CheckpointCorrupt(
                    f"{path} is no DCP metadata: {error}",
                    code="S436",
                    where=str(path),
                    expected="the .metadata that torch.distributed.checkpoint wrote",
                ) from error
            _keep_inside(metadata, self._folder)
            self._known = metadata
        return self._known


def _keep_inside(metadata: Metadata, folder: Path) -> None:
    """No entry may lie outside the folder."""
    for info in (metadata.storage_data or {}).values():
        name = str(getattr(info, "relative_path", ""))
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise UnsafeObject(
                f"the DCP metadata points to {name!r}, outside its folder", code="S437", where=".metadata"
            )


class _SafePlanner(DefaultLoadPlanner):
    """Byte entries without free unpickling."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafeObject(
                f"{name} of the DCP folder holds an object that only pickle can carry",
                code="S437",
                where=name,
                expected="tensors and plain values",
                next_step="choose what to import with --keys",
            ) from error
        self.state_dict[name] = loaded


class DcpFolder:
    """A DCP folder: its entries by path, each read when asked for. Raises ``CheckpointCorrupt`` (S436)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = _SafeReader(folder)
        metadata = self._reader.read_metadata()
        self._entries: dict[str, Any] = dict(metadata.state_dict_metadata)
        known = metadata.planner_data or {}
        self.paths: dict[tuple[str | int, ...], str] = {
            tuple(known.get(name) or (name,)): name for name in self._entries
        }

    def description(self, path: tuple[str | int, ...]) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """dtype and shape of a tensor; ``None`` for an entry of another kind."""
        entry = self._entries[self.paths[path]]
        if isinstance(entry, TensorStorageMetadata):
            return entry.properties.dtype, tuple(entry.size)
        if isinstance(entry, BytesStorageMetadata):
            return None
        raise CheckpointCorrupt(f"{self.folder} has an entry of an unknown kind", code="S436")

    def read(self, paths: Sequence[tuple[str | int, ...]]) -> dict[tuple[str | int, ...], Any]:
        """Tensors (whole, on the CPU) and values of some entries."""
        state: dict[str, Any] = {}
        for path in paths:
            described = self.description(path)
            state[self.paths[path]] = (
                torch.empty(described[1], dtype=described[0]) if described else io.BytesIO()
            )
        if state:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    load(
                        state,
                        storage_reader=self._reader,
                        planner=_SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                        no_dist=True,
                    )
            except (CheckpointException, OSError, RuntimeError, ValueError, EOFError) as error:
                unsafe = _cause(error)
                if unsafe is not None:
                    raise unsafe from error
                raise CheckpointCorrupt(
                    f"{self.folder} cannot be read: {_first_line(error)}",
                    code="S436",
                    where=str(self.folder),
                    expected="a whole DCP folder",
                ) from error
        return {path: state[self.paths[path]] for path in paths}


def _cause(error: BaseException) -> UnsafeObject | None:
    """DCP wraps what happens inside it."""
    failures = getattr(error, "failures", None) or {}
    for failure in failures.values():
        inner = failure[0] if isinstance(failure, tuple) else failure
        if isinstance(inner, UnsafeObject):
            return inner
    return error if isinstance(error, UnsafeObject) else None


def _first_line(error: BaseException) -> str:
    failures = getattr(error, "failures", None) or {}
    for failure in failures.values():
        inner = failure[0] if isinstance(failure, tuple) else failure
        return f"{type(inner).__name__}: {inner}".splitlines()[0]
    return (str(error) or type(error).__name__).splitlines()[0]


def read_dcp_tensors(
    folder: Path, paths: Sequence[tuple[Any, ...]]
) -> list[tuple[tuple[Any, ...], torch.Tensor]]:
    """Those of the paths that the folder holds as tensors."""
    opened = DcpFolder(folder)
    present = [path for path in paths if path in opened.paths and opened.description(path) is not None]
    return list(opened.read(present).items())


def write_dcp(state: dict[str, Any], folder: Path) -> None:
    """Write a nested dict as a new DCP folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(str(folder), sync_files=True), no_dist=True)
