"""Mixtures: shares hold in any stretch, every sample of a source comes before one comes again, ranks see one order."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitorch_dist.data import Loader, Mixture
from minitorch_dist.data.loader import Arrays
from minitorch_dist.data.mixture import MOST_TURNS, turns


def numbered(n, source):
    """Samples that say what they are: inputs (source, row), labels the row."""
    return Arrays(np.stack([np.full(n, source), np.arange(n)], 1), np.arange(n))


some_weights = st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any)


@settings(deadline=None)
@given(some_weights)
def test_in_turns_no_source_is_a_whole_sample_from_its_share(weights):
    order = turns(weights)
    assert Counter(order) == {i: weight for i, weight in enumerate(weights) if weight}
    so_far = np.cumsum(np.eye(len(weights), dtype=int)[order], 0)
    shares = np.outer(np.arange(1, len(order) + 1), weights) / len(order)
    assert np.abs(so_far - shares).max() < 1


def test_the_turns_of_the_docstring():
    assert "".join("wcb"[i] for i in turns([8, 3, 1])) == "wwcwwcwwcwwb"


weights_of_three = st.lists(st.integers(0, 30), min_size=3, max_size=3).filter(any)
some_phases = st.lists(st.tuples(st.integers(1, 90), weights_of_three), min_size=1, max_size=3)


@settings(deadline=None)
@given(some_phases, st.lists(st.integers(1, 25), min_size=3, max_size=3), st.integers(0, 99))
def test_shares_hold_and_no_sample_comes_again_before_all_have_come(phases, sizes, seed):
    names = ["a", "b", "c"]
    mixture = Mixture({name: numbered(n, i) for i, (name, n) in enumerate(zip(names, sizes, strict=True))},
                      [(samples, dict(zip(names, weights, strict=True))) for samples, weights in phases], seed)
    inputs, labels = mixture.read(np.arange(len(mixture)))
    np.testing.assert_array_equal(inputs[:, 1], labels)
    at = 0
    for samples, weights in phases:
        here = np.cumsum(np.eye(3, dtype=int)[inputs[at:at + samples, 0]], 0)
        shares = np.outer(np.arange(1, samples + 1), weights) / sum(weights)
        assert np.abs(here - shares).max() < 1
        at += samples
    assert at == len(mixture) == len(inputs)
    for source, n in enumerate(sizes):
        rows = labels[inputs[:, 0] == source]
        for i in range(0, len(rows), n):
            assert len(set(rows[i:i + n])) == len(rows[i:i + n])
        assert len(set(rows)) == min(n, len(rows))
    asked = np.random.default_rng(seed).integers(0, len(mixture), 7)
    np.testing.assert_array_equal(mixture.read(asked)[0], inputs[asked])


def test_each_time_through_a_source_has_another_order_and_other_sources_change_it_not():
    two = Mixture({"a": numbered(40, 0), "b": numbered(9, 1)}, [(120, {"a": 2, "b": 1})])
    rows = two.read(np.arange(120))
    of_a = rows[1][rows[0][:, 0] == 0]
    assert of_a[:40].tolist() != of_a[40:].tolist() and sorted(of_a[:40]) == sorted(of_a[40:]) == list(range(40))
    alone = Mixture({"a": numbered(40, 0)}, [(80, {"a": 1})])
    np.testing.assert_array_equal(alone.read(np.arange(80))[1], of_a)
    other = Mixture({"a": numbered(40, 0)}, [(80, {"a": 1})], seed=1)
    assert other.read(np.arange(80))[1].tolist() != of_a.tolist()


def test_sources_of_one_length_have_orders_of_their_own():
    mixture = Mixture({"a": numbered(40, 0), "b": numbered(40, 1)}, [(80, {"a": 1, "b": 1})])
    inputs, labels = mixture.read(np.arange(80))
    assert labels[inputs[:, 0] == 0].tolist() != labels[inputs[:, 0] == 1].tolist()


def test_weights_are_taken_in_lowest_terms():
    """300,000 turns would be too many to list; 100,000 aren't."""
    sources = {"a": numbered(9, 0), "b": numbered(9, 1)}
    large, small = (Mixture(sources, [(18, {"a": 2 * n, "b": n})]) for n in (MOST_TURNS, 1))
    np.testing.assert_array_equal(large.where(np.arange(18)), small.where(np.arange(18)))
    assert len(Mixture(sources, [(18, {"a": MOST_TURNS - 1, "b": 1})])) == 18


def test_ranks_have_their_parts_of_one_order_with_the_shares_in_each():
    mixture = Mixture({"a": numbered(100, 0), "b": numbered(11, 1)}, [(64, {"a": 3, "b": 1}), (36, {"b": 1})])
    alone = Loader(mixture, None, 20, shuffle=False)
    ranks = [Loader(mixture, None, 20, shuffle=False, rank=rank, size=4) for rank in range(4)]
    for step, (whole, *parts) in enumerate(zip(*(loader.epoch(0) for loader in (alone, *ranks)), strict=True)):
        np.testing.assert_array_equal(whole.inputs, np.concatenate([part.inputs for part in parts]))
        for part in parts:
            assert abs((part.inputs[:, 0] == 0).sum() - 3.75) < 2 or step > 2


def test_ranks_without_a_row_of_a_last_batch_have_none_of_the_same_form():
    mixture = Mixture({"a": numbered(10, 0), "b": numbered(3, 1)}, [(9, {"a": 2, "b": 1})])
    lasts = [list(Loader(mixture, None, 4, shuffle=False, rank=rank, size=4).epoch(0))[2] for rank in range(4)]
    assert sorted(len(last.inputs) for last in lasts) == [0, 0, 0, 1]
    one = next(last for last in lasts if len(last.inputs))
    for last in lasts:
        assert last.inputs.shape[1:] == one.inputs.shape[1:] and last.inputs.dtype == one.inputs.dtype
        assert last.labels.shape == last.inputs.shape[:1] and last.labels.dtype == one.labels.dtype and last.count == 1


@pytest.mark.parametrize("none", [[], np.arange(0), range(0)], ids=["list", "array", "range"])
def test_of_no_samples_the_sources_say_what_they_are_like(none):
    mixture = Mixture({"a": numbered(10, 0), "b": numbered(3, 1)}, [(9, {"a": 2, "b": 1})])
    inputs, labels = mixture.read(none)
    assert inputs.shape == (0, 2) and labels.shape == (0,) and inputs.dtype == labels.dtype == np.int64
    assert [it.shape for it in mixture.where(none)] == [(0,), (0,)]


def test_it_prints_what_comes_of_what():
    mixture = Mixture({"web": numbered(1000, 0), "code": numbered(50, 1), "books": numbered(7, 2)},
                      [(90, {"web": 8, "code": 3, "books": 1}), (10, {"books": 1, "code": 1})])
    assert str(mixture) == """\
source   rows  phase 1  phase 2  samples  times through
web     1,000   66.7 %    0.0 %       60           0.06
code       50   25.0 %   50.0 %       28           0.56
books       7    8.3 %   50.0 %       12           1.71
                    90       10      100"""
    inputs, _ = mixture.read(np.arange(100))
    assert np.bincount(inputs[:, 0]).tolist() == [60, 28, 12]


def test_one_of_a_trillion_samples_costs_what_one_of_ten_does():
    class Endless:
        def __len__(self):
            return 10**11

        def read(self, indices):
            return indices, indices

    mixture = Mixture({"a": Endless(), "b": Endless()}, [(10**12, {"a": 7, "b": 2}), (10, {"b": 1})])
    sources, rows = mixture.where([0, 10**12 - 1, 10**12 + 5])
    assert sources[2] == 1 and (rows < 10**11).all()


def test_what_does_not_fit_is_told():
    a, b = numbered(5, 0), numbered(6, 1)
    for phases, said in [([(5, {"c": 1})], "a weight for 'c'; the sources are 'a', 'b'"),
                         ([(5, {"a": -1, "b": 2})], "whole numbers, 0 or more"),
                         ([(5, {})], "one is above 0"), ([], "no phases"), ([(0, {"a": 1})], "a phase of 0 samples"),
                         ([(5, {"a": MOST_TURNS, "b": 1})], "sum up to 100,001")]:
        with pytest.raises(ValueError, match=said):
            Mixture({"a": a, "b": b}, phases)
    with pytest.raises(TypeError, match=r"weight of 'a'=0.7: must be a whole number"):
        Mixture({"a": a, "b": b}, [(5, {"a": 0.7, "b": 0.3})])
    with pytest.raises(TypeError, match="seed=0.5: must be a whole number"):
        Mixture({"a": a}, [(5, {"a": 1})], seed=0.5)
    with pytest.raises(ValueError, match="b has no samples"):
        Mixture({"a": a, "b": numbered(0, 1)}, [(5, {"a": 1})])
    mixture = Mixture({"a": a, "b": Arrays(np.zeros((4, 3), np.int64), np.arange(4))}, [(6, {"a": 1, "b": 1})])
    with pytest.raises(ValueError, match=r"samples of b are int64 \(3,\), others are int64 \(2,\)"):
        mixture.read([0, 1])
    with pytest.raises(ValueError, match=r"samples of b are int64 \(3,\)"):
        mixture.read([0])       # a's: another rank may have b's
    halves = Mixture({"a": a, "b": Arrays(np.full((4, 2), 0.5), np.arange(4))}, [(6, {"a": 1, "b": 1})])
    with pytest.raises(ValueError, match=r"samples of b are float64 \(2,\), others are int64 \(2,\)"):
        halves.read([0, 1])
    fickle = numbered(6, 1)
    fickle.read = lambda rows: (np.zeros((len(rows), 2), np.float64 if len(rows) else np.int64),
                                np.zeros(len(rows), int))
    with pytest.raises(ValueError, match=r"samples of b are float64 \(2,\), others are int64 \(2,\)"):
        Mixture({"a": a, "b": fickle}, [(6, {"a": 1, "b": 1})]).read([0, 1])
    for lost in ([6], [-1], [3, -1, 2]):
        with pytest.raises(IndexError, match="samples 0 to 5, got"):
            mixture.read(lost)
