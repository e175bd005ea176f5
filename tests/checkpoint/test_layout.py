"""Boxes: every byte written once, every box read right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.checkpoint.layout import SPLIT_BYTES, Box, Shared, assign, span_pairs


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets, lengths = [], []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        offsets.append(start)
        lengths.append(draw(st.integers(1, size - start)))
    return Box(tuple(offsets), tuple(lengths))


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@given(st.data(), shapes)
def test_span_pairs_copy_what_slicing_copies(data: st.DataObject, shape: tuple[int, ...]) -> None:
    source_box, target_box = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    whole = np.arange(int(np.prod(shape, dtype=int)), dtype=np.int32).reshape(shape)
    source = whole[source_box.within(Box.whole(shape))].copy().reshape(source_box.lengths)
    target = np.full(target_box.lengths, -1, dtype=np.int32)
    expected = target.copy()
    common = source_box.intersect(target_box)
    if common is None:
        return
    expected[common.within(target_box)] = source[common.within(source_box)]
    flat_source, flat_target = source.reshape(-1).view(np.uint8), target.reshape(-1).view(np.uint8)
    for start, to, nbytes in span_pairs(common, source_box, target_box, 4):
        flat_target[to : to + nbytes] = flat_source[start : start + nbytes]
    np.testing.assert_array_equal(target, expected)


def test_span_pairs_of_whole_rows_are_one_span() -> None:
    rows = Box((2, 0), (3, 8))
    assert list(span_pairs(rows, Box((0, 0), (8, 8)), rows, 4)) == [(2 * 32, 0, 3 * 32)]


items = st.lists(
    st.tuples(
        st.integers(1, 3 * SPLIT_BYTES // 1024), st.sampled_from([(0,), (0, 1), (1, 2, 3), (0, 1, 2, 3)])
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None)
@given(items)
def test_shared_boxes_are_written_once_and_evenly(sizes: list[tuple[int, tuple[int, ...]]]) -> None:
    shared = [
        Shared(f"t{i}", Box((0, 0), (rows, 256)), 4, holders) for i, (rows, holders) in enumerate(sizes)
    ]
    written: dict[str, list[Box]] = {}
    load = dict.fromkeys(range(4), 0)
    for rank in range(4):
        for name, box in assign(shared, rank):
            written.setdefault(name, []).append(box)
            load[rank] += box.count * 4
            assert rank in next(s.holders for s in shared if s.name == name)
    for item in shared:
        parts = written[item.name]
        assert sum(part.count for part in parts) == item.box.count
        assert not any(a.intersect(b) for i, a in enumerate(parts) for b in parts[:i])
    for holders in {s.holders for s in shared}:
        group = [s for s in shared if s.holders == holders]
        total = sum(s.box.count * 4 for s in group)
        for rank in holders:
            mine = sum(b.count * 4 for n, b in assign(group, rank))
            assert mine <= total / len(holders) + SPLIT_BYTES + 1024


def test_what_must_not_be_split_is_written_whole_by_its_first_holder() -> None:
    buffer = Shared("b", Box((0,), (4 * SPLIT_BYTES,)), 4, (0,), splittable=False)
    assert assign([buffer], 0) == [("b", buffer.box)]
    assert assign([buffer], 1) == []


@pytest.mark.parametrize(
    ("shape", "box", "fits"),
    [
        ((4,), Box((3,), (1,)), True),
        ((4,), Box((3,), (2,)), False),
        ((), Box((), ()), True),
        ((4, 4), Box((0,), (4,)), False),
    ],
)
def test_fits(shape: tuple[int, ...], box: Box, fits: bool) -> None:
    assert box.fits(shape) is fits
