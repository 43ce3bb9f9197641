"""Multi-head latent attention whose heads are divided is the whole one, and sends latents' sums; as
test_sequence_parallel.py."""

import numpy as np
import pytest

from tests.crews import crews

CASES = "tests.parallel.latent_cases:"
BATCH, TIME, DIM = 2, 8, 20
Q_RANK, KV_RANK, ROPE = 9, 7, 2
KINDS = [False, True, "regather"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("sizes", ["queries of latents", "queries of x"])
def test_a_block_that_is_cut_is_the_whole_block(sizes, n, kind):
    """Its result and every gradient: of what makes latents and of their norms, which all ranks have whole, too."""
    y, dx, grads = crews.call(CASES + "through_block", 1, args=(sizes, None))[0]
    for got_y, got_dx, got_grads in crews.call(CASES + "through_block", n, args=(sizes, kind)):
        np.testing.assert_allclose(got_y, y, rtol=0, atol=1e-10)
        np.testing.assert_allclose(got_dx, dx, rtol=0, atol=1e-10)
        assert set(got_grads) == set(grads)
        for name, wanted in grads.items():
            assert abs(wanted).max() > 1e-3
            np.testing.assert_allclose(got_grads[name], wanted, rtol=0, atol=1e-10, err_msg=name)


def ring(features, halves, n, times=BATCH * TIME):
    """Bytes that a rank sends of so many numbers in a reduce-scatter or all-gather (1 half), or an all-reduce (2)."""
    return halves * (n - 1) * times * features * 8 // n


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("sizes", ["queries of latents", "queries of x"])
def test_a_block_sends_the_sums_of_latents(sizes, n):
    """Forward two all-reduces of the output, as of other attentions; backward those of the MLP's input, of what makes
    queries, of the latents and of the key. With sequence parallelism their halves; besides, backward sums the gradients
    of what stays whole: two norms, and `down` with its norms."""
    queries = Q_RANK if sizes == "queries of latents" else DIM
    down = DIM * (KV_RANK + ROPE) + KV_RANK
    down += DIM * Q_RANK + Q_RANK if queries == Q_RANK else 0
    back = queries + KV_RANK + ROPE + DIM
    for found in crews.call(CASES + "counted", n, args=(sizes, False)):
        assert found == {"forward": {"all_reduce": (2, ring(2 * DIM, 2, n))},
                         "backward": {"all_reduce": (4, ring(back, 2, n))}}
    for found in crews.call(CASES + "counted", n, args=(sizes, True)):
        out, small = (2, ring(2 * DIM, 1, n)), 4 + (queries == Q_RANK)
        assert found == {
            "forward": {"all_gather": (4, ring(back, 1, n)), "reduce_scatter": out},
            "backward": {"all_gather": out, "reduce_scatter": (4, ring(back, 1, n)),
                         "all_reduce": (small, ring(2 * DIM + down, 2, n, 1))}}


def test_it_writes_what_the_whole_model_writes():
    """A rank keeps all of the latents, whatever heads it has."""
    for (whole, cut), (text, own), kept in crews.call(CASES + "written", 2):
        np.testing.assert_allclose(cut, whole, rtol=0, atol=1e-10)
        np.testing.assert_array_equal(own, text)
        assert kept == [2 * 3 * 9 * (KV_RANK + ROPE) * 8] * 2


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("sizes", ["queries of latents", "queries of x"])
def test_annotations_send_as_much(sizes, n):
    """But the key's cotangents, which come from all heads before they are summed."""
    queries = Q_RANK if sizes == "queries of latents" else DIM
    for found in crews.call(CASES + "annotated", n, args=(sizes,)):
        assert found == {"forward": {"all_reduce": (2, ring(2 * DIM, 2, n))},
                         "backward": {"all_reduce": (3, ring(queries + KV_RANK + DIM, 2, n)),
                                      "all_gather": (1, ring(4 * ROPE, 1, n))}}
