"""Differentiable collectives, against finite differences across ranks and against the same network on one rank.

Only the ranks import minitorch_dist.parallel.collectives, which enters them into the op table: here they would be
entries for which tests/autodiff has no sample.
"""

import numpy as np
import pytest

from tests.crews import crews

CASES = "tests.parallel.collective_cases:"


def values(shape, *key):
    """As the ranks make them."""
    return np.random.default_rng(list(key)).standard_normal(shape)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_derivatives_equal_finite_differences_across_ranks_to_second_order(n):
    for passed, entries in crews.call(CASES + "gradients", n):
        assert set(entries) == {"copy_to", "reduce_from", "scatter_to", "gather_from", "all_gather", "reduce_scatter",
                                "all_to_all", "broadcast", "reduce"}
        assert all(any(name.startswith(entry) for name in passed) for entry in entries)


def test_tape_and_transform_agree():
    crews.call(CASES + "tape", 2)


def test_wrong_rules_are_found_on_every_rank():
    for found in crews.call(CASES + "wrong_rules", 2):
        assert [name for name, _ in found] == ["identity for a sum", "own cotangent only", "mean for sum", "wrong part",
                                               "wrong tangent"]
        assert all(named for _, named in found)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_network_cut_between_ranks_is_the_whole_network(n):
    x, w1, w2, u = values((5, 6), 20), values((6, 4 * n), 21), values((4 * n, 3), 22), values((5, 3), 23)
    h = np.tanh(x @ w1)
    dh = (u @ w2.T) * (1 - h * h)
    for rank, (y, dx, dw1, dw2, forward, backward) in enumerate(crews.call(CASES + "megatron", n)):
        part = slice(4 * rank, 4 * rank + 4)
        for got, expected in ((y, h @ w2), (dx, dh @ w1.T), (dw1, (x.T @ dh)[:, part]), (dw2, (h.T @ u)[part])):
            np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-11)
        assert (forward, backward) == (1, 1)


def test_errors_say_what_to_do():
    parts, axis, counts, shares = crews.call(CASES + "errors", 2)[0]
    assert "3 elements" in parts and "2 ranks" in parts
    assert "axis 1 is out of range" in axis
    assert "isn't rank 0's share of 4 elements on 2 ranks, 2" in shares
    assert "both send_counts and recv_counts" in counts
