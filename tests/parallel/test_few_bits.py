"""fully_shard's messages of 8 and 4 bits (ZeRO++'s qwZ and qgZ): every step is the one made by hand; bytes by axis are
closed forms; models still learn."""

import re

import numpy as np
import pytest

from minitorch_dist.testing import ranks
from tests.crews import crews

from . import few_bits_cases as cases

CASES = "tests.parallel.few_bits_cases:"


# ---------------------------------------------------------------- what is rounded, and what is lost

@pytest.mark.parametrize("policy, n, group", [("both", 1, None), ("values", 2, None), ("both", 3, None), ("both", 4, 2),
                                              ("gradients", 6, 3), ("small blocks", 6, 2), ("16 bits", 4, 2)])
def test_steps_are_those_made_by_hand(policy, n, group):
    """What is rounded is 1e4 times what the order of float32's sums does."""
    states, values = crews.call(CASES + "trained", n, (policy, True if group is None else group))[0]
    for state, wanted in zip(states, cases.by_hand(policy, n, group), strict=True):
        for key in wanted:
            np.testing.assert_allclose(state[key], wanted[key], rtol=1e-5, atol=2e-7, err_msg=key)
    encoding = cases.POLICIES[policy].param_encoding
    expected = cases.by_unit(states[-1], lambda flat: cases.rounded(flat, encoding))
    for key, value in expected.items():
        tolerance = 2 ** -8 if policy == "16 bits" else 1e-6
        np.testing.assert_allclose(values[key], value, rtol=tolerance, atol=1e-9, err_msg=key)


def test_by_hand_can_tell():
    """One policy from another, one number of ranks from another, and sums in two steps from those in one."""
    last = {way: cases.by_hand(*way, stages=1)[-1] for way in (
        ("both", 1, None), ("values", 1, None), ("gradients", 1, None), ("gradients", 2, None), ("gradients", 4, None),
        ("gradients", 4, 2), ("values", 2, None))}

    def apart(a, b):
        return max(abs(last[a][key] - last[b][key]).max() for key in last[a])
    for a, b in (("both", "values"), ("both", "gradients")):
        assert apart((a, 1, None), (b, 1, None)) > 1e-3
    assert apart(("gradients", 1, None), ("gradients", 2, None)) > 1e-3 > 1e-5 > \
        apart(("values", 1, None), ("values", 2, None))
    assert apart(("gradients", 4, 2), ("gradients", 4, None)) > 1e-3


def test_exact_mode_has_one_set_of_bits_of_values_of_8_bits():
    """On any number of ranks, and with what neighbours keep."""
    alone = crews.call(CASES + "exact_digests", 1)[0]
    assert len(set(alone[0])) == 2
    for n in (2, 4):
        assert crews.call(CASES + "exact_digests", n)[0] == alone * (n // 2)


@pytest.mark.parametrize("stage, group", [(1, None), (2, None), (3, 2)])
def test_what_is_added_up_without_a_sum_is_rounded_once(stage, group):
    one, several = crews.call(CASES + "summed", 4, (stage, group))[0]
    assert one == several and len(one) == 64


# ---------------------------------------------------------------- counted

@pytest.mark.parametrize("policy, value", [("both", 4), ("16 bits", 2)])
@pytest.mark.parametrize("n, group", [(4, 2), (6, 3), (6, 2)])
def test_what_each_axis_carries(n, group, policy, value):
    """And of 16 bits, what leaves a node, a quarter of stage 3's: the paper's 3M to 0.75M."""
    nodes, scales = n // group, 4 / 256
    for seen in crews.call(CASES + "counted", n, (group, policy)):
        psi = sum(seen["units"])
        within, across = psi * (group - 1) / group, psi / group * (nodes - 1) / nodes
        paper = {("node,gpu", "all_gather"): (1 + scales) * psi * (n - 1) / n,
                 ("gpu", "all_gather"): (1 + scales) * within,
                 ("gpu", "all_to_all"): (1 / 2 + scales) * within, ("node", "all_to_all"): (1 / 2 + scales) * across}
        assert {key: seen["sent"].pop(key) for key in paper} == paper
        assert set(seen["sent"]) == {("node,gpu", "all_reduce")}       # who has used what; losses
        assert seen["kept"] == (1 + scales) * psi / group
        assert seen["after"] == seen["live"]["buffer"] == 0
        # Per node, of `psi` elements of which each other node's must come, or go: a gather's, and `group` ranks' sums.
        leaves = psi * (nodes - 1) / nodes
        usual, here = 3 * 2 * leaves, (1 + scales) * leaves + group * paper["node", "all_to_all"]
        assert here == pytest.approx((1 / 4 + 2 * scales / 6) * usual, rel=1e-12)


# ---------------------------------------------------------------- models

@pytest.mark.thorough
def test_models_learn_as_they_did():
    """On average: curves of single initial values part by chance, in 32 bits as well."""
    for usual, rounded in crews.call(CASES + "learned", 4, (40, (6, 7, 8, 9))):
        assert usual[0] > 2.8 and np.mean(usual[-5:]) < 0.4
        np.testing.assert_allclose(rounded, usual, rtol=0.15)
        assert np.mean(rounded[-5:]) < 0.45 and len({*usual, *rounded}) == 80


def test_what_is_frozen_travels_as_it_is():
    for whole, rounded, losses in crews.call(CASES + "frozen", 4):
        assert whole == {True} and rounded == {False} and losses[-1] < losses[0]


def test_a_step_with_inf_is_left_out_by_all():
    assert all(seen == [(True, False), (False, True)] for seen in crews.call(CASES + "with_inf", 4))


def test_the_bits_on_a_gpu():
    for seen in ranks.call(CASES + "on_a_gpu", 2):       # the GPU that is played there stays with its process
        assert seen == (True, {"cuda"})


def test_what_is_refused():
    expected = {"exact": r"not in Blocks\(bits=4, size=256\), in which the sum would depend on how many ranks",
                "stage 2": "stage=2, param_encoding=Blocks.*take stage=3", "float64": r"weight \(float64\)",
                "unlike": "different models.*mp_policy=", "drawn": r"reduce_encoding=E3M0\(\); it may be Blocks",
                "size": r"param_encoding=Blocks\(bits=8, size=96\).*divides the 4,096 elements",
                "bits": r"Blocks\(5, 256\): numbers have 8 or 4 bits", "odd": r"Blocks\(4, 33\).*an even number"}
    for found in crews.call(CASES + "refused", 2):
        assert set(found) == set(expected)
        for what, words in expected.items():
            assert found[what].startswith("ValueError") and re.search(words, found[what], re.DOTALL), found[what]
