"""A decoder's block whose heads are divided is the whole one, and sends what it must; as test_tensor_parallel.py."""

import numpy as np
import pytest

from tests.crews import crews

from . import cross_cases

CASES = "tests.parallel.cross_cases:"
BATCH, TIME, SOURCES, DIM = 2, 6, 5, 24


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", cross_cases.KINDS)
def test_a_block_that_is_cut_is_the_whole_block(kind, n):
    """Its result and every gradient, the memory's too; dropped are the weights that one process drops."""
    y, given, grads = crews.call(CASES + "through_block", 1, (False, kind))[0]
    for got_y, got_given, got_grads in crews.call(CASES + "through_block", n, (True, kind)):
        np.testing.assert_allclose(got_y, y, rtol=0, atol=1e-10)
        for got, wanted in zip(got_given, given, strict=True):
            assert abs(wanted).max() > 1e-2
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10)
        assert set(got_grads) == set(grads)
        for name, wanted in grads.items():
            assert abs(wanted).max() > 1e-3
            np.testing.assert_allclose(got_grads[name], wanted, rtol=0, atol=1e-10, err_msg=name)


def ring(positions, n):
    """Bytes that a rank sends in an all-reduce of so many positions' features."""
    return 2 * (n - 1) * BATCH * positions * DIM * 8 // n


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("annotated", [False, True])
def test_a_block_sends_an_all_reduce_more_and_one_of_the_memory(n, annotated):
    (_, whole), = crews.call(CASES + "counted", 1, args=(False,))
    for found, y in crews.call(CASES + "counted", n, args=(annotated,)):
        np.testing.assert_allclose(y, whole, rtol=0, atol=1e-10)
        assert found == {"forward": {"all_reduce": (3, ring(3 * TIME, n))},
                         "backward": {"all_reduce": (4, ring(3 * TIME + SOURCES, n))}}


def test_a_cache_keeps_a_ranks_heads():
    for whole, cut, kept in crews.call(CASES + "read", 2):
        np.testing.assert_allclose(cut, whole, rtol=0, atol=1e-10)
        assert kept == 2 * BATCH * (4 // 2) * 3 * 8 * (TIME + SOURCES)


def test_what_cannot_be_cut_is_refused():
    for words, of_dropout in crews.call(CASES + "refused", 2):
        assert "an attention's dropout, of class Noisy, is a Dropout of its own making" in of_dropout
        assert "sequence_parallel divides the sequences, and cross_attention looks at another one" in words
