"""The computed shuffle is a permutation, differs by seed and epoch, and looks random."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.data.permutation import permute


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 2**40))
def test_every_row_comes_once_an_epoch(size: int, seed: int, epoch: int) -> None:
    drawn = permute(np.arange(size), size=size, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(drawn), np.arange(size))


@settings(deadline=None)
@given(st.integers(2, 3000), st.integers(0, 2**32), st.data())
def test_an_entry_does_not_depend_on_what_is_asked_beside_it(
    size: int, seed: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, size - 1))
    whole = permute(np.arange(size), size=size, seed=seed, epoch=5)
    assert permute(np.array([position]), size=size, seed=seed, epoch=5)[0] == whole[position]


def test_seed_and_epoch_change_the_order() -> None:
    orders = [
        permute(np.arange(1000), size=1000, seed=seed, epoch=epoch) for seed in (1, 2) for epoch in (0, 1)
    ]
    for first in range(4):
        for second in range(first + 1, 4):
            assert (orders[first] == orders[second]).sum() < 15


def test_the_order_looks_random() -> None:
    size, epochs = 64, 4000
    where = np.stack([permute(np.arange(size), size=size, seed=7, epoch=epoch) for epoch in range(epochs)])
    # Each position must lead to each row about equally often: chi-square with 63 degrees of freedom has
    # mean 63 and standard deviation 11.2, so 130 is six of them away.
    for position in range(size):
        counts = np.bincount(where[:, position], minlength=size)
        assert ((counts - epochs / size) ** 2 / (epochs / size)).sum() < 130
    # Neighbours must not stay neighbours: a random order keeps (size - 1) * 2 / size of them, about two.
    assert 1.5 < (np.abs(np.diff(where, axis=1)) == 1).sum() / epochs < 2.5


def test_the_order_is_pinned() -> None:
    """A resumed run of a later version must read the same rows."""
    assert permute(np.arange(8), size=8, seed=1, epoch=0).tolist() == [5, 3, 0, 4, 7, 6, 2, 1]
