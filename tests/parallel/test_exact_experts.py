"""Exact mode where experts are divided over ranks that have samples of their own: the bits of one process."""

import functools

import numpy as np
import pytest

from tests.crews import crews, threads

CASES, MOE = "tests.parallel.exact_experts_cases:", "tests.parallel.moe_cases:"


@functools.cache
def of_one_process(setting):
    return crews.call(MOE + "exact_bits", 1, args=(setting,), env=threads(1))[0]


@pytest.mark.parametrize(("setting", "ranks", "size", "stage"), [
    ("sequences", 2, 1, 0), ("sequences", 2, 2, 0), ("switch", 4, 2, 3), ("no capacity", 4, 4, 1),
    *(pytest.param(*each, marks=pytest.mark.thorough) for each in (
        ("sequences", 4, 1, 0), ("no capacity", 2, 2, 0), ("sequences", 4, 2, 2), ("switch", 8, 4, 0),
        ("nothing dropped", 4, 2, 1)))])
def test_experts_have_the_bits_of_one_process(setting, ranks, size, stage):
    """Some with clipped gradients, whose norm is one process's, too. size: how many ranks divide the experts."""
    wanted = of_one_process(setting)
    for found in crews.call(MOE + "exact_bits", ranks, args=(setting, size, stage)):
        assert not found or found == wanted


def test_a_gradient_that_would_be_lost_raises():
    for found in crews.call(CASES + "misuse", 2):
        for stage in 0, 2:
            assert "doesn't come by their answers" in found.pop(("in the loss", stage))
            assert "a hook waits for the gradient of a share of experts" in found.pop(("a hook", stage))
        assert "gradients were zeroed after 1 of the 2 backward passes" in found.pop("zeroed half-way")
        assert found.pop("begun anew") is None
        assert "summed over the ranks already" in found.pop("not zeroed")


def test_a_step_that_was_given_up_leaves_nothing():
    assert crews.call(CASES + "forgotten", 2) == [True, True]


def test_stage_3_frees_what_experts_have_gathered():
    """The copies that rows of each rank are multiplied by are views of it."""
    for seen, gone, absent in crews.call(CASES + "freed", 2):
        assert seen == 2 and all(gone) and absent


def test_a_copy_of_the_module_has_its_own_gradients():
    assert crews.call(CASES + "copied", 2) == [True, True]


def test_norms_of_shares_are_those_of_whole_experts():
    """To the bit where a share is whole sixteens of elements."""
    (wanted,) = crews.call(CASES + "norms", 1, args=(1,))
    for ranks, size in (2, 2), (4, 2), (4, 4):
        for found in crews.call(CASES + "norms", ranks, args=(size,)):
            np.testing.assert_allclose(found.pop("not whole sixteens"), wanted["not whole sixteens"], rtol=1e-13)
            assert found == {name: norm for name, norm in wanted.items() if name in found}
