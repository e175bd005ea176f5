"""Noticing saves of a model that does not change: an optimizer over other parameters, a wrong copy.

The checksums are there anyway, so this costs nothing: whole files are compared by theirs.
"""

from __future__ import annotations

from typing import Any

from serai.checkpoint.agent.ledger import Generation

__all__ = ["ChangeWatch"]

_DEPTH = 4


class ChangeWatch:
    """Compares each durable generation with the one before. Not thread safe: one tier asks it."""

    def __init__(self) -> None:
        self._attempt = -1
        self._step = -1
        self._bytes: Any = None

    def unchanged_since(self, generation: Generation) -> int | None:
        """The step of the generation before, if since then the step advanced and no byte of any shard of
        this node changed, headers included; only for states with a module or an optimizer.
        """
        now = {
            rank: [
                (file.size, tuple(file.chunks[number] for number in sorted(file.chunks)))
                for file in shard.files
                if file.kind != "frozen"
            ]
            for rank, shard in generation.shards.items()
        }
        before, step, attempt = self._bytes, self._step, self._attempt
        self._bytes, self._step, self._attempt = now, generation.step, generation.key[0]
        if attempt != generation.key[0] or generation.step <= step or now != before:
            return None
        trains = any(
            _holds_training(tree, _DEPTH)
            for shard in generation.shards.values()
            if any(row["file"] == 0 for row in shard.table)
            for tree in shard.trees.values()
        )
        return step if trains else None


def _holds_training(tree: Any, depth: int) -> bool:
    if not isinstance(tree, dict) or not depth:
        return False
    return (
        "$module" in tree
        or "$optimizer" in tree
        or any(_holds_training(item, depth - 1) for item in tree.values())
    )
