"""Computed orders: complete, as random as a list's, and nothing kept."""

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minitorch_dist.data import Permutation, Sampler
from minitorch_dist.data.permutation import LARGEST, mixed_up

ORDER = [8, 5, 2, 4, 9, 6, 10, 11, 0, 7, 1, 3]      # of 12 numbers, by the key ("x", 3)


@settings(deadline=None)
@given(n=st.integers(1, 5000), key=st.integers(0, 2**40))
def test_each_number_once(n, key):
    np.testing.assert_array_equal(np.sort(Permutation(n, "a", key)(np.arange(n))), np.arange(n))


@settings(deadline=None)
@example(n=LARGEST, places=[0.0, 0.3, 0.99])
@given(n=st.integers(1, LARGEST), places=st.lists(st.floats(0, 1, exclude_max=True), max_size=20))
def test_large_ones_have_what_they_should_and_nothing_twice(n, places):
    asked = np.unique(np.array([int(p * n) for p in places], np.int64))
    p = Permutation(n, n)
    found = p(asked)
    assert found.dtype == np.int64 and len(np.unique(found)) == len(asked)
    assert not found.size or 0 <= found.min() <= found.max() < n
    np.testing.assert_array_equal([p(each) for each in asked], found)       # no place depends on what else is asked for


def chi_square(counts, expected):
    """By how many standard deviations the sum of squares is above what chance would give."""
    counts = np.asarray(counts)
    return (((counts - expected) ** 2 / expected).sum() - (len(counts) - 1)) / math.sqrt(2 * (len(counts) - 1))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_a_few_are_equally_likely(n):
    drawn = 20 * math.factorial(n) + 200
    counts = Counter(tuple(Permutation(n, "few", i)(np.arange(n)).tolist()) for i in range(drawn))
    orders = list(permutations(range(n)))
    assert abs(chi_square([counts[order] for order in orders], drawn / len(orders))) < 4


@pytest.mark.parametrize("n", [16, 30, 1000])
def test_orders_of_many_are_as_random_as_shuffled_lists(n):
    drawn = 1000
    orders = np.array([Permutation(n, "many", i)(np.arange(n)) for i in range(drawn)])
    for place in (0, n // 2, n - 1):        # any number stands there equally often
        assert abs(chi_square(np.bincount(orders[:, place], minlength=n), drawn / n)) < 4
    apart = (orders[:, 1] - orders[:, 0]) % n       # and behind any other
    assert abs(chi_square(np.bincount(apart, minlength=n)[1:], drawn / (n - 1))) < 4
    fixed, rising = (orders == np.arange(n)).sum(1), (np.diff(orders) > 0).sum(1)
    assert abs(fixed.mean() - 1) < 4 / math.sqrt(drawn)         # one number keeps its place, on average
    assert abs(rising.mean() - (n - 1) / 2) < 4 * math.sqrt((n + 1) / 12 / drawn)       # Euler's numbers
    assert 0.85 < rising.var() / ((n + 1) / 12) < 1.15


def test_what_mixes_up_gives_the_numbers_of_record():
    # splitmix64's first outputs from seed 1234567, as its authors' program prints them
    golden, state, found = 0x9E3779B97F4A7C15, 1234567, []
    for _ in range(3):
        state = (state + golden) % 2**64
        found.append(int(mixed_up(np.array([state], np.uint64))[0]))
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_other_keys_give_other_orders_and_equal_ones_that_of_record():
    keys = [("x", seed, epoch) for seed in range(4) for epoch in range(4)]
    orders = {tuple(Permutation(20, *key)(np.arange(20)).tolist()) for key in keys}
    assert len(orders) == 16
    assert Permutation(12, "x", 3)(np.arange(12)).tolist() == ORDER


@pytest.mark.parametrize("places", [[-1], [7], [0, 9], [0.5], [True]])
def test_there_is_no_place_outside(places):
    with pytest.raises(IndexError, match="places 0 to 6"):
        Permutation(7, "x")(np.array(places))


@pytest.mark.parametrize("n", [0, -3, LARGEST + 1])
def test_it_says_how_many_there_can_be(n):
    with pytest.raises(ValueError, match=f"n={n} numbers; expected 1 to"):
        Permutation(n, "x")


# ---------------------------------------------------------------- as a Sampler's order

@settings(deadline=None)
@given(n=st.integers(1, 300), batch_size=st.integers(1, 80), epoch=st.integers(0, 9), data=st.data())
def test_a_sampler_computes_each_batch_of_an_epoch(n, batch_size, epoch, data):
    sampler = Sampler(n, batch_size, seed=3, shuffle="computed")
    batches = list(sampler.epoch(epoch))
    np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.arange(n))
    np.testing.assert_array_equal(np.concatenate(batches), sampler.order(epoch))
    start = data.draw(st.integers(0, len(sampler)))
    for a, b in zip(batches[start:], sampler.epoch(epoch, start), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_sampler_of_a_trillion_samples_begins_anywhere():
    sampler = Sampler(10**12, 5, shuffle="computed")
    batches = sampler.epoch(2, start=10**11)
    one, other = next(batches), next(batches)
    assert len(one) == 5 and len({*one, *other}) == 10 and max(one) < 10**12
    in_order = Sampler(10**12, 5, shuffle=False)
    assert next(in_order.epoch(2, start=10**11)).tolist() == [5 * 10**11 + i for i in range(5)]


def test_a_sampler_knows_its_ways_to_shuffle():
    with pytest.raises(ValueError, match="shuffle='random': expected True, False or \"computed\""):
        Sampler(10, 2, shuffle="random")
