"""Sums of rows by index, to the bit: in order where a segment is short, and always the same."""

from types import SimpleNamespace

import numpy as np
import pytest

from minitorch_dist import backend, kernels
from minitorch_dist.kernels import segment_sums as module
from minitorch_dist.kernels.segment_sums import definition, segment_sums

from .harness import random
from .samples.segment_sums import indices

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")


def test_a_segment_of_one_stretch_is_added_up_in_order():
    """As NumPy's add.at does in float32; a segment of two stretches comes out otherwise."""
    counts = [module.STRETCH, 1, 0, 3, module.STRETCH, 2, 5, 2 * module.STRETCH, 0]
    index = np.random.default_rng(0).permutation(np.repeat(np.arange(9), counts))
    g = random(len(index), 33) * np.float32(10) ** random(len(index), 1, seed=1)     # whose order matters
    got, wanted = segment_sums(g, index, 9), definition(g, index, 9)
    differ = (got != wanted).any(axis=1)
    assert not np.delete(differ, 7).any() and differ[7]
    assert (definition(g[::-1], index[::-1], 9) != wanted).any()


def test_a_longer_segment_is_lanes_of_consecutive_rows():
    """Each lane's sum in order, by hand; the tree adds at most LANES numbers."""
    n, lanes = 1050, 64
    g, length = random(n, 3), -(-n // lanes)
    shares = [definition(g[k:k + length], np.zeros(len(g[k:k + length]), int), 1)[0] for k in range(0, n, length)]
    got = segment_sums(g, np.zeros(n, int), 1)[0]
    np.testing.assert_array_equal(got, np.sum(shares + [np.zeros(3, "f4")] * (lanes - len(shares)), axis=0))


@pytest.mark.parametrize("long", [0.0, 0.8])
def test_other_rows_in_between_change_nothing(long):
    """The same bits on every run, and wherever the other indices stand, as long as the order of each is kept."""
    n, rows = 90, 6
    index, g = indices(n, rows, long=long), random(n, 5) * np.float32(10) ** random(n, 1, seed=1)
    wanted = segment_sums(g, index, rows)
    np.testing.assert_array_equal(segment_sums(g, index, rows), wanted)
    order = np.argsort(index, kind="stable")
    np.testing.assert_array_equal(segment_sums(g[order], index[order], rows), wanted)
    mixed = np.argsort(np.random.default_rng(1).random(n), kind="stable")
    for i in range(rows):
        places = np.sort(np.flatnonzero(index[mixed] == i))
        mixed[places] = np.sort(mixed[places])
    assert (mixed != np.arange(n)).any()
    np.testing.assert_array_equal(segment_sums(g[mixed], index[mixed], rows), wanted)


@pytest.mark.parametrize("n, rows", [(1, 1), (1, 40), (16, 16), (17, 15), (300, 7), (300, 255), (257, 1000)])
def test_counting_and_sorting_find_the_same_order(n, rows, monkeypatch):
    """Keys and bounds to the last number, also of indices from the end and out of range."""
    index = np.random.default_rng([n, rows]).integers(-2 * rows, 2 * rows, n)
    counted = module._order(index, rows, rows > n)
    monkeypatch.setattr(module, "SMALL", 0)
    for got, wanted in zip(counted, module._order(index, rows, rows > n), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_in_a_cuda_graph_nothing_is_sorted(monkeypatch):
    """CuPy's sort would wait."""
    index = np.random.default_rng(1).integers(-5, 5, 70)
    wanted = module._order(index, 5, False)
    monkeypatch.setattr(module, "SMALL", 0)
    monkeypatch.setattr(np, "sort", None)
    monkeypatch.setattr(backend.recording, "graph", SimpleNamespace(launched=lambda name, times: True))
    for got, array in zip(module._order(index, 5, False), wanted, strict=True):
        np.testing.assert_array_equal(got, array)


def test_shapes():
    g = random(2, 3, 4, 5)
    got = segment_sums(g, np.array([[1, 0, 1], [-1, 1, 0]]), 4)
    np.testing.assert_array_equal(got, definition(g.reshape(6, 4, 5), np.array([1, 0, 1, 3, 1, 0]), 4))
    assert segment_sums(g[:0], np.zeros((0, 3), int), 4).tolist() == np.zeros((4, 4, 5)).tolist()
    assert segment_sums(g[..., :0], np.zeros((2, 3), int), 4).shape == (4, 4, 0)
    assert segment_sums(g[:0], np.zeros((0, 3), int), 0).shape == (0, 4, 5)
    np.testing.assert_array_equal(segment_sums(g[0], np.array([5, 4, -9]), 4),
                                  definition(g[0], np.array([1, 0, 3]), 4))     # out of range: modulo, as CuPy
    for index in (np.zeros(2), np.zeros(3, int)):
        with pytest.raises(ValueError, match="the index must be of integers"):
            segment_sums(g, index, 4)
