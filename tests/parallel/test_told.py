"""Errors that a first afternoon meets: each says what is wrong, and what to do."""

import pytest

from tests.crews import crews

from .test_tensor_misuse import told

CASES = "tests.parallel.told_cases:"


def test_what_a_communication_hook_returns():
    for found in crews.call(CASES + "hooks", 2):
        told(found, {kind: ("TypeError", f"a communication hook has returned a {kind}: it returns a fun", "work.wait")
                     for kind in ("Work", "ndarray", "NoneType")})


def test_sums_of_another_step_are_named():
    for found in crews.call(CASES + "adversaries", 2):
        told({"": found}, {"": ("RuntimeError", "already, of 2.bias, 2.weight, 0.bias, 0.weight, and would",
                                "call zero_grad() of their model before it")})


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_step_of_what_nobody_divides(n):
    """Of what a Loader without rank and size gives, all ranks have all rows; nothing is stepped."""
    for found, same in crews.call(CASES + "steps", n):
        everything, ours = found.pop("everything"), found.pop("ours")
        told(found, {"plain": ("TypeError", "train_step: a Linear, whose gradients nobody sums", "DistributedDataPara"),
                     "no world": ("TypeError", "world is None; give", "comm.world()")})
        assert ours is None and same == (n > 1)
        if n > 1:
            told({"": everything}, {"": ("ValueError", f"a batch of 12 samples, of which the {n} ranks have {12 * n}",
                                         "Loader(…, rank=world.rank, size=world.size)")})
