"""The order of the samples against published values, a naive reference, and its promises."""

from __future__ import annotations

import random

import numpy as np
import pytest

from data_pipeline.order import Permutation, SampleOrder, derive_key, shuffled, splitmix64

pytestmark = pytest.mark.unit

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def naive_splitmix64(state: int) -> int:
    state = (state + GAMMA) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def naive_key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = naive_splitmix64(key ^ part)
    return key


def naive_permutation(n: int, key: int) -> list[int]:
    """Each position alone, in plain integers."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    values = []
    for value in range(n):
        while True:
            left, right = value >> half, value & mask
            for number in range(8):
                left, right = right, left ^ (naive_splitmix64(right ^ naive_key(key, number)) & mask)
            value = left << half | right
            if value < n:
                break
        values.append(value)
    return values


def naive_epoch(num_samples: int, rows: int, seed: int, epoch: int, window_members: int) -> list[int]:
    """The whole epoch as a list: no seeking, no arithmetic on the short member."""
    members = naive_permutation(-(-num_samples // rows), naive_key(seed, epoch))
    order: list[int] = []
    for window, first in enumerate(range(0, len(members), window_members)):
        ids = [member * rows + row for member in members[first : first + window_members] for row in range(rows)]
        ids = [sample for sample in ids if sample < num_samples]
        key = naive_key(seed, epoch, window)
        order += [ids[i] for i in sorted(range(len(ids)), key=lambda i: naive_splitmix64(i ^ key))]
    return order


def test_splitmix64_gives_the_published_sequence() -> None:
    # the first outputs of the reference C code for the state 1234567
    states = np.array([(1234567 + i * GAMMA) & MASK for i in range(5)], dtype=np.uint64)
    assert splitmix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 255, 1000])
def test_permutation_is_a_bijection_with_an_inverse(n: int) -> None:
    permutation = Permutation(n, key=derive_key(3, n))
    values = permutation.forward(np.arange(n))
    assert sorted(values.tolist()) == list(range(n))
    assert permutation.inverse(values).tolist() == list(range(n))
    assert values.tolist() == naive_permutation(n, naive_key(3, n))


def test_permutation_seeks_in_a_huge_range() -> None:
    permutation = Permutation(10**12, key=5)
    positions = np.array([0, 1, 10**11, 10**12 - 1])
    values = permutation.forward(positions)
    assert len(set(values.tolist())) == 4
    assert values.max() < 10**12
    assert permutation.inverse(values).tolist() == positions.tolist()


def test_permutation_spreads_evenly() -> None:
    """Over many keys, each value stands first about equally often (chi-square, 7 degrees of freedom, p > 1e-6)."""
    counts = np.bincount([int(Permutation(8, derive_key(key)).forward(0)[0]) for key in range(800)], minlength=8)
    assert ((counts - 100) ** 2 / 100).sum() < 42


def test_shuffled_is_a_permutation() -> None:
    assert sorted(shuffled(777, 9).tolist()) == list(range(777))
    assert shuffled(777, 9).tolist() != shuffled(777, 10).tolist()


@pytest.mark.parametrize(
    ("num_samples", "rows", "window"),
    [(1, 4, 2), (4, 4, 2), (5, 4, 2), (37, 4, 3), (64, 8, 3), (65, 8, 3), (203, 10, 4)],
)
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_order_equals_the_naive_reference(num_samples: int, rows: int, window: int, seed: int) -> None:
    expected = [s for epoch in range(4) for s in naive_epoch(num_samples, rows, seed, epoch, window)]
    order = SampleOrder(num_samples, rows, seed, window)
    assert order(0, 4 * num_samples).tolist() == expected
    rng = random.Random(seed)
    for _ in range(50):  # in any order of asking, by old and by new objects
        start = rng.randrange(3 * num_samples)
        count = rng.randrange(num_samples + 1)
        assert order(start, count).tolist() == expected[start : start + count]
    assert (
        SampleOrder(num_samples, rows, seed, window)(num_samples, 1).tolist() == expected[num_samples : num_samples + 1]
    )


def test_each_epoch_covers_every_sample_once_in_its_own_order() -> None:
    n = 64 * 40 + 17
    order = SampleOrder(n, 64, seed=11)
    epochs = [order(epoch * n, n).tolist() for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(n))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert SampleOrder(n, 64, seed=12)(0, n).tolist() != epochs[0]


def test_order_never_changes_between_versions() -> None:
    """A run that is resumed by a later version must go on in the order in which it began."""
    expected = [23017, 71386, 67160, 97878, 26709, 46906]
    assert SampleOrder(100_000, 64, seed=1234)(250_000, 6).tolist() == expected
    assert naive_epoch(100_000, 64, seed=1234, epoch=2, window_members=32)[50_000:50_006] == expected


def test_order_seeks_far_at_once() -> None:
    """1e10 samples: nothing of that size is ever built."""
    order = SampleOrder(10**10 + 3, 64, seed=1)
    ids = order(7 * (10**10 + 3) - 5, 10)
    assert len(set(ids.tolist())) == 10
    assert ids.min() >= 0
    assert ids.max() < 10**10 + 3


def test_the_members_ahead_are_those_of_two_windows() -> None:
    n = 11 * 64 - 5
    order = SampleOrder(n, 64, seed=3, window_members=4)
    epochs = [naive_permutation(11, naive_key(3, epoch)) for epoch in range(2)]
    assert [order.window(position) for position in (0, n - 1, n)] == [(0, 0), (0, 2), (1, 0)]
    assert order.members_ahead(0, 0).tolist() == epochs[0][:8]
    assert order.members_ahead(0, 1).tolist() == epochs[0][4:11]
    assert order.members_ahead(0, 2).tolist() == epochs[0][8:] + epochs[1][:4]
    assert SampleOrder(n, 64, seed=3).members_ahead(0, 0).tolist() == epochs[0] + epochs[1]
