"""``serai.load``: a whole checkpoint as plain tensors and values, in one process, with no process group."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serai.checkpoint.bind import Binding, Index, rebuild_node
from serai.checkpoint.catalog import Damage, as_storage, find, lost_manifest, scan
from serai.checkpoint.format import Manifest, TensorEntry
from serai.checkpoint.memory import usable_cores
from serai.checkpoint.source import StorageSource, fill
from serai.checkpoint.values import decode
from serai.errors import CheckpointCorrupt, CheckpointNotFound, SeraiError, StateMismatch, StorageError
from serai.storage.base import Storage

__all__ = ["load", "load_generation"]


def load(
    root: str | Path | Storage, *, step: int | None = None, keys: Iterable[str] | None = None, rank: int = 0
) -> dict[str, Any]:
    """Full tensors (on the CPU) and plain values of a checkpoint, as a nested dict in the shape that was saved.

    Args:
        root: folder or URL given to ``Checkpointer``.
        step: that step's newest generation; the newest of all by default.
        keys: only these top-level names, or dotted names of tensors or subtrees (``"model.embed.weight"``).
        rank: whose values to take where every rank kept its own.

    Every byte is verified. Without ``step`` a damaged generation is passed over with a warning; with it,
    ``CheckpointCorrupt`` is raised. ``CheckpointNotFound`` when there is nothing, ``StateMismatch`` for
    unknown ``keys``.
    """
    storage = as_storage(root)
    wanted = None if keys is None else [keys] if isinstance(keys, str) else list(keys)
    if step is not None:
        storage, folder, manifest = find(storage, step)
        return load_generation(storage, folder, manifest, wanted, rank)
    failed: dict[tuple[str, tuple[int, int]], str] = {}
    # Looked at anew after every failure: retention of a live run may have removed what was listed.
    while True:
        entries = list(scan(storage))
        reasons = [str(entry) for _, entry in entries if isinstance(entry, Damage)] + [*failed.values()]
        left = [
            (folder, entry)
            for folder, entry in entries
            if isinstance(entry, Manifest) and (folder, entry.key) not in failed
        ]
        if not left:
            break
        folder, manifest = max(left, key=lambda pair: pair[1].key)
        try:
            result = load_generation(storage, folder, manifest, wanted, rank)
        except (CheckpointCorrupt, StorageError) as error:
            failed[folder, manifest.key] = error.message
            continue
        lost = lost_manifest(storage, manifest.key)
        _warn_skipped(([str(lost)] if lost is not None else []) + reasons, manifest.step)
        return result
    if reasons:
        raise CheckpointCorrupt(
            f"nothing in {storage.url} verifies: " + "; ".join(reasons[:5]),
            where=storage.url,
            next_step=f"serai ckpt verify {storage.url}",
        )
    raise CheckpointNotFound(
        f"there is no checkpoint in {storage.url}",
        where=storage.url,
        next_step=f"serai ckpt ls {storage.url}",
    )


def _warn_skipped(reasons: list[str], step: int) -> None:
    if reasons:
        import warnings

        warnings.warn(
            f"loading step {step}, since newer checkpoints do not verify: " + "; ".join(reasons[:5]),
            stacklevel=3,
        )


def load_generation(
    storage: Storage, folder: str, manifest: Manifest, wanted: list[str] | None, rank: int = 0
) -> dict[str, Any]:
    """``load`` on one generation that was found already; raises ``CheckpointCorrupt`` if it does not verify."""
    try:
        return _read_generation(storage, folder, manifest, wanted, rank)
    except SeraiError:
        raise
    except Exception as error:
        # Checksums hold, yet the content cannot be: a stranger may have sealed anything.
        raise CheckpointCorrupt(
            f"the content of {folder} makes no sense: {type(error).__name__}: {error}",
            where=storage.url_of(folder),
        ) from error


def _read_generation(
    storage: Storage, folder: str, manifest: Manifest, wanted: list[str] | None, rank: int
) -> dict[str, Any]:
    source = StorageSource(storage, folder, manifest, "durable")
    index = Index(manifest, source.values, rank, manifest.world_size)
    binding = Binding(index)
    made: dict[str, Any] = {}

    def make(entry: TensorEntry) -> Any:
        if wanted is not None and not _selected(entry, wanted):
            return _SKIPPED
        if entry.name not in made:
            made[entry.name] = binding.new(entry)
        return made[entry.name]

    def named(name: str) -> Any:
        entry = index.by_name.get(name)
        if entry is None:
            raise CheckpointCorrupt(f"the stored values refer to the tensor {name!r}, which is not there")
        return make(entry)

    result = {
        name: decode(tree, named, node=lambda tag, body: rebuild_node(tag, body, index, make))
        for name, tree in index.trees.items()
        if wanted is None or any(_related(name, key) for key in wanted)
    }
    if wanted is not None:
        _check_keys(result, wanted, folder)
        result = {name: _prune(value, (name,), wanted) for name, value in result.items()}
    threads = max(1, usable_cores())
    with ThreadPoolExecutor(threads) as pool:
        fill(source, binding.copies, pool)
    binding.finish()
    return result


class _Skipped:
    """Stands for a tensor that was not asked for, until it is pruned."""


_SKIPPED = _Skipped()


def _selected(entry: TensorEntry, wanted: list[str]) -> bool:
    dotted = ".".join(str(key) for key in entry.path)
    return any(_covers(key, dotted) or key == entry.name for key in wanted)


def _covers(key: str, dotted: str) -> bool:
    return dotted == key or dotted.startswith(key + ".")


def _related(name: str, key: str) -> bool:
    return _covers(name, key) or _covers(key, name)


def _check_keys(result: dict[str, Any], wanted: list[str], folder: str) -> None:
    dotted = set(_paths(result, ""))
    for key in wanted:
        if not any(_covers(key, path) for path in dotted):
            import difflib

            near = difflib.get_close_matches(key, dotted, 3, 0.5) or sorted(dotted)[:5]
            raise StateMismatch(
                f"the checkpoint has nothing called {key!r}",
                where=folder,
                expected="perhaps " + ", ".join(near) if near else "a name that is there",
                next_step="serai ckpt show",
            )


def _paths(value: Any, prefix: str) -> Iterable[str]:
    if prefix:
        yield prefix
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        yield from _paths(item, f"{prefix}.{key}" if prefix else str(key))


def _prune(value: Any, path: tuple[Any, ...], wanted: list[str]) -> Any:
    """Drop what was not asked for; lists keep their places, with ``None`` for what is left out."""
    dotted = ".".join(str(key) for key in path)
    if any(_covers(key, dotted) for key in wanted):
        return value
    if isinstance(value, dict):
        return {
            key: _prune(item, (*path, key), wanted)
            for key, item in value.items()
            if any(_related(f"{dotted}.{key}", name) for name in wanted)
        }
    if isinstance(value, list | tuple):
        return [_prune(item, (*path, i), wanted) for i, item in enumerate(value)]
    return None if isinstance(value, _Skipped) else value
