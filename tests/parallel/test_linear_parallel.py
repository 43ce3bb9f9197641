"""Attention by states over ranks: of parts of the sequence, of parts of the heads; what it sends."""

import numpy as np
import pytest

from tests.crews import crews

CASES = "tests.parallel.linear_cases:"
BATCH, HEADS, SIZE, OUT, DIM, TIME = 2, 3, 4, 5, 20, 8
PARTS = {"contiguous": 1, "zigzag": 2}
LEFT = {"linear": 1, "delta": SIZE * SIZE}      # numbers that say what a part leaves of what came before it
each_rule = pytest.mark.parametrize("rule", LEFT)


@pytest.fixture(scope="module")
def one_process():
    """{(rule, whether packed): (y, gradients)}."""
    return {(rule, packed): crews.call(CASES + "whole", 1, args=(rule, packed))[0]
            for rule in LEFT for packed in (False, True)}


@each_rule
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("n, layout", [(1, "zigzag"), (2, "contiguous"), (2, "zigzag"), (3, "contiguous"),
                                       (3, "zigzag"), (4, "contiguous"), (4, "zigzag")])
def test_parts_of_sequences(one_process, n, layout, packed, rule):
    """Each of several stretches, the last one shorter."""
    y, grads = one_process[rule, packed]
    for got_y, got_grads in crews.call(CASES + "divided", n, args=(rule, layout, packed)):
        np.testing.assert_allclose(got_y, y, rtol=0, atol=1e-12)
        for got, wanted in zip(got_grads, grads, strict=True):
            assert abs(wanted).max() > 0.1
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)


@each_rule
def test_it_shows_what_is_wrong(one_process, rule):
    found = crews.call(CASES + "divided_wrongly", 2, args=(rule,))[0]
    assert len(found) >= 5
    for name, y in found.items():
        assert abs(y - one_process[rule, True][0]).max() > 1e-2, name


@each_rule
@pytest.mark.parametrize("layout", PARTS)
@pytest.mark.parametrize("n", [2, 4])
def test_what_is_sent_does_not_depend_on_the_length(n, layout, rule):
    """(N - 1) · batch · heads · (size · out + 1) elements of each piece, size · out + size² by the delta rule, forward
    and backward, in a message each."""
    sent = (n - 1) * PARTS[layout] * BATCH * HEADS * (SIZE * OUT + LEFT[rule]) * 8
    for time in (24, 240):
        for found in crews.call(CASES + "sent", n, args=(rule, layout, time)):
            assert found == {"forward": {"all_gather": (1, sent)}, "backward": {"reduce_scatter": (1, sent)}}


@each_rule
@pytest.mark.parametrize("kind", [False, True, "regather"])
@pytest.mark.parametrize("n", [2, 4])
def test_a_block_that_is_cut_is_the_whole_block(n, kind, rule):
    """Its result and every gradient: of norms, which all ranks have whole, and of what is kept, too."""
    y, dx, grads = crews.call(CASES + "through_block", 1, args=(None, rule))[0]
    assert {"attention.norm.weight", "attention.q_norm.weight", "attention.decay.bias"} < set(grads)
    for got_y, got_dx, got_grads in crews.call(CASES + "through_block", n, args=(kind, rule)):
        np.testing.assert_allclose(got_y, y, rtol=0, atol=1e-10)
        np.testing.assert_allclose(got_dx, dx, rtol=0, atol=1e-10)
        assert set(got_grads) == set(grads)
        for name, wanted in grads.items():
            assert abs(wanted).max() > 1e-3
            np.testing.assert_allclose(got_grads[name], wanted, rtol=0, atol=1e-10, err_msg=name)


@each_rule
@pytest.mark.parametrize("n", [2, 4])
def test_a_block_sends_what_any_other_sends(n, rule):
    """Two all-reduces of its output forward and two of its input backward, or their halves; and the gradient of the
    norm of each head's result. With sequence parallelism also those of the two norms."""
    def ring(features, halves, times=BATCH * TIME):
        return halves * (n - 1) * times * features * 8 // n
    head = DIM // 4
    for found in crews.call(CASES + "counted", n, args=(False, rule)):
        assert found == {"forward": {"all_reduce": (2, ring(2 * DIM, 2))},
                         "backward": {"all_reduce": (3, ring(2 * DIM, 2) + ring(head, 2, 1))}}
    for found in crews.call(CASES + "counted", n, args=(True, rule)):
        assert found["forward"] == {"all_gather": (2, ring(2 * DIM, 1)), "reduce_scatter": (2, ring(2 * DIM, 1))}
        assert found["backward"] == {
            "all_gather": (2, ring(2 * DIM, 1)), "reduce_scatter": (2, ring(2 * DIM, 1)),
            "all_reduce": (3, ring(head + 2 * DIM, 2, 1))}


@each_rule
def test_it_writes_what_the_whole_model_writes(rule):
    """A rank keeps the states of its heads."""
    for (whole, cut), kept, decay in crews.call(CASES + "written", 2, args=(rule,)):
        np.testing.assert_array_equal(cut, whole)
        assert kept == [2 * 3 * heads * 4 * 4 * 8 for heads in (4, 2)] and decay == "DecayOfHeads(2)"


def test_parts_that_do_not_fit():
    for parts, rows in crews.call(CASES + "errors", 2):
        assert "3 positions on each of 2 ranks are no 2 equal chunks; layout='zigzag'" in parts
        assert "documents (2, 12) must be (batch, time), here (2, 24): a number for each position" in rows
