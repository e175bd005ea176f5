"""Who writes what, and where in its shard: made once per shape of the state, then reused.

A plan holds names, boxes and file offsets, never addresses: those are resolved again at every save.
Ranks compare notes only when the plan is made, so the steady state has no collective.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serai.checkpoint.format import ALIGNMENT, pack_header
from serai.checkpoint.hashing import hex_digest
from serai.checkpoint.layout import Box, Shared, assign
from serai.checkpoint.ranks import Ranks
from serai.checkpoint.state import Kind, Leaf

__all__ = ["PlannedFile", "PlannedPiece", "SavePlan", "fingerprint", "make_plan"]

Signature = tuple[Any, ...]

# Fewer frozen bytes than this are not worth a file of their own.
FROZEN_BYTES = 1 << 20


@dataclass(frozen=True)
class PlannedPiece:
    """One piece this rank writes: part ``box`` of leaf number ``leaf``.

    ``start`` is its place in file number ``file`` of this rank, ``slot`` its place in the slot.
    """

    leaf: int
    box: Box
    file: int
    start: int
    slot: int
    nbytes: int


@dataclass(frozen=True)
class PlannedFile:
    """One file this rank writes: its header and where the whole file lies in the slot."""

    kind: str
    header: bytes
    offset: int
    size: int


@dataclass(frozen=True)
class SavePlan:
    """What one rank writes at each save of one shape of state.

    Attributes:
        files: the shard, and a file of its own for frozen parameters, which need not be written twice.
        pieces: in the order of their place in the slot.
        total: bytes of the slot that are used.
        table: what the agent needs to describe the pieces in the manifest, as JSON.
        probes: ``(leaf number, hash of its name)`` of every tensor that other ranks also hold.
    """

    identity: str
    signature: Signature
    files: tuple[PlannedFile, ...]
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
    local_suffix = f"@{ranks.rank}" if ranks.world_size > 1 else ""
    files: list[PlannedFile] = []
    pieces: list[PlannedPiece] = []
    table: list[dict[str, Any]] = []
    offset = 0
    for kind, members in _by_file(parts, leaves):
        names = [
            leaves[number].name + (local_suffix if holders[number] is None else "") for number, _ in members
        ]
        sizes = [box.count * leaves[number].dtype.itemsize for number, box in members]
        header = pack_header(
            (_piece_name(name, leaves[number], box), leaves[number].dtype, box.lengths, nbytes)
            for (number, box), name, nbytes in zip(members, names, sizes, strict=True)
        )
        start = len(header)
        for (number, box), name, nbytes in zip(members, names, sizes, strict=True):
            pieces.append(PlannedPiece(number, box, len(files), start, offset + start, nbytes))
            own_rank = ranks.rank if holders[number] is None and local_suffix else None
            table.append(_table_row(leaves[number], name, box, len(files), start, own_rank))
            start += nbytes
        files.append(PlannedFile(kind, header, offset, start))
        offset += -(-start // ALIGNMENT) * ALIGNMENT
    probes = tuple(
        (number, zlib.crc32(leaf.name.encode("utf-8", "surrogatepass")))
        for number, leaf in enumerate(leaves)
        if leaf.kind in (Kind.REPLICATED, Kind.SHARDED)
        and (group := holders[number])
        and len(group) > 1
        and leaf.nbytes
    )
    headers = b"".join(file.header for file in files)
    identity = hex_digest(
        headers + repr((ranks.rank, ranks.world_size, table)).encode("utf-8", "surrogatepass")
    )
    return SavePlan(identity, signature, tuple(files), tuple(pieces), offset, table, probes)


def _by_file(parts: list[tuple[int, Box]], leaves: Sequence[Leaf]) -> list[tuple[str, list[tuple[int, Box]]]]:
    """The parts of each file, large elements first so that every piece is aligned to its own."""
    parts.sort(key=lambda part: (-leaves[part[0]].dtype.itemsize, part[0], part[1]))
    frozen = [part for part in parts if leaves[part[0]].frozen]
    if sum(box.count * leaves[number].dtype.itemsize for number, box in frozen) < FROZEN_BYTES:
        return [("shard", parts)]
    return [("shard", [part for part in parts if not leaves[part[0]].frozen]), ("frozen", frozen)]


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


def _table_row(leaf: Leaf, name: str, box: Box, file: int, start: int, rank: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": name,
        "path": list(leaf.path),
        "dtype": leaf.dtype.name,
        "shape": list(leaf.shape),
        "file": file,
        "start": start,
        "offsets": list(box.offsets),
        "lengths": list(box.lengths),
    }
    if rank is not None:
        row["rank"] = rank
    if leaf.detail:
        row["detail"] = leaf.detail
    return row
