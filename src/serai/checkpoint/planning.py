"""Who writes what, and where in its shard: made once per shape of the state, then reused.

A plan holds names, boxes and file offsets, never addresses: those are resolved again at every save.
Ranks compare notes only when the plan is made, so the steady state has no collective.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serai.checkpoint.format import pack_header
from serai.checkpoint.hashing import hex_digest
from serai.checkpoint.layout import Box, Shared, assign
from serai.checkpoint.ranks import Ranks
from serai.checkpoint.state import Kind, Leaf

__all__ = ["PlannedPiece", "SavePlan", "fingerprint", "make_plan"]

Signature = tuple[Any, ...]


@dataclass(frozen=True)
class PlannedPiece:
    """One piece this rank writes: part ``box`` of leaf number ``leaf``, at byte ``start`` of the shard."""

    leaf: int
    box: Box
    start: int
    nbytes: int


@dataclass(frozen=True)
class SavePlan:
    """What one rank writes at each save of one shape of state.

    Attributes:
        header: the bytes of the shard before the data.
        pieces: in file order, end to end.
        total: size of the shard in bytes.
        table: what the agent needs to describe the pieces in the manifest, as JSON.
        probes: ``(leaf number, hash of its name)`` of every tensor that other ranks also hold.
    """

    identity: str
    signature: Signature
    header: bytes
    pieces: tuple[PlannedPiece, ...]
    total: int
    table: list[dict[str, Any]]
    probes: tuple[tuple[int, int], ...]


def fingerprint(leaves: Sequence[Leaf]) -> Signature:
    """Equal exactly when a plan may be reused. Cheap: compared at every save."""
    return tuple(
        (leaf.name, leaf.dtype.name, leaf.shape, leaf.box, leaf.kind, leaf.holders) for leaf in leaves
    )


def make_plan(leaves: Sequence[Leaf], ranks: Ranks, signature: Signature) -> SavePlan:
    """Agree with the other ranks (one or two exchanges) and lay out this rank's shard."""
    holders = _holders(leaves, ranks)
    shared: list[Shared] = []
    own: list[int] = []
    by_name: dict[str, int] = {}
    for number, leaf in enumerate(leaves):
        by_name[leaf.name] = number
        group = holders[number]
        if group is None:
            own.append(number)
        elif leaf.box.count or not leaf.nbytes:
            splittable = leaf.kind is not Kind.BUFFER
            # The lowest rank's buffers are the true ones, whole; parameters may be cut.
            shared.append(
                Shared(
                    leaf.name, leaf.box, leaf.dtype.itemsize, group if splittable else group[:1], splittable
                )
            )
    parts = [(by_name[name], box) for name, box in assign(shared, ranks.rank)]
    parts += [(number, leaves[number].box) for number in own]
    parts = [part for part in parts if part[1].count or not leaves[part[0]].box.count]
    parts.sort(key=lambda part: (-leaves[part[0]].dtype.itemsize, part[0], part[1]))
    local_suffix = f"@{ranks.rank}" if ranks.world_size > 1 else ""
    position = 0
    placed: list[tuple[int, Box, str, int, int]] = []
    for number, box in parts:
        leaf = leaves[number]
        nbytes = box.count * leaf.dtype.itemsize
        name = leaf.name + (local_suffix if holders[number] is None else "")
        placed.append((number, box, name, position, nbytes))
        position += nbytes
    header = pack_header(
        (_piece_name(name, leaves[number], box), leaves[number].dtype, box.lengths, nbytes)
        for number, box, name, _, nbytes in placed
    )
    start = len(header)
    pieces = tuple(PlannedPiece(number, box, start + at, nbytes) for number, box, _, at, nbytes in placed)
    table = [
        _table_row(
            leaves[number],
            name,
            box,
            start + at,
            ranks.rank if holders[number] is None and local_suffix else None,
        )
        for number, box, name, at, _ in placed
    ]
    probes = tuple(
        (number, zlib.crc32(leaf.name.encode("utf-8", "surrogatepass")))
        for number, leaf in enumerate(leaves)
        if leaf.kind in (Kind.REPLICATED, Kind.SHARDED)
        and (group := holders[number])
        and len(group) > 1
        and leaf.nbytes
    )
    identity = hex_digest(header + repr(ranks.rank).encode() + repr(table).encode())
    return SavePlan(identity, signature, header, pieces, start + position, table, probes)


def _holders(leaves: Sequence[Leaf], ranks: Ranks) -> list[tuple[int, ...] | None]:
    """For each leaf the ranks that hold the same box, or ``None`` where every rank keeps its own."""
    if ranks.world_size == 1:
        return [(0,) for _ in leaves]
    everyone = tuple(range(ranks.world_size))
    plain = [
        (leaf.name, leaf.shape, leaf.dtype.name)
        for leaf in leaves
        if leaf.kind in (Kind.REPLICATED, Kind.BUFFER)
    ]
    held: dict[tuple[Any, ...], tuple[int, ...]] = {}
    ambiguous: set[str] = set()
    digests = ranks.gather(hex_digest(repr(plain).encode("utf-8", "surrogatepass")))
    if len(set(digests)) > 1:
        found: dict[tuple[Any, ...], list[int]] = {}
        shapes: dict[str, set[tuple[Any, ...]]] = {}
        for rank, names in enumerate(ranks.gather(plain)):
            for item in names:
                found.setdefault(item, []).append(rank)
                shapes.setdefault(item[0], set()).add(item)
        held = {item: tuple(group) for item, group in found.items()}
        # One name with several shapes is a hand-made sharding: each rank keeps its own part.
        ambiguous = {name for name, variants in shapes.items() if len(variants) > 1}
    result: list[tuple[int, ...] | None] = []
    for leaf in leaves:
        if leaf.kind is Kind.LOCAL or leaf.name in ambiguous:
            result.append(None)
        elif leaf.kind is Kind.SHARDED:
            result.append(ranks.to_group(leaf.holders or ()))
        else:
            result.append(held.get((leaf.name, leaf.shape, leaf.dtype.name), everyone))
    return result


def _piece_name(name: str, leaf: Leaf, box: Box) -> str:
    if box == Box.whole(leaf.shape):
        return name
    return name + "[" + ",".join(f"{a}:{a + n}" for a, n in zip(box.offsets, box.lengths, strict=True)) + "]"


def _table_row(leaf: Leaf, name: str, box: Box, start: int, rank: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": name,
        "path": list(leaf.path),
        "dtype": leaf.dtype.name,
        "shape": list(leaf.shape),
        "start": start,
        "offsets": list(box.offsets),
        "lengths": list(box.lengths),
    }
    if rank is not None:
        row["rank"] = rank
    if leaf.detail:
        row["detail"] = leaf.detail
    return row
