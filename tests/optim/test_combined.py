"""Combined: several optimizers of one model, as one."""

import contextlib

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import optim


def test_a_combined_in_a_combined_is_one():
    a, b, c = (mt.tensor(np.ones(2), requires_grad=True) for _ in range(3))
    inner = optim.Combined(optim.Adam([a]), optim.SGD([b], lr=0.1))
    outer = optim.Combined(inner, optim.AdamW([c]))
    assert [type(o).__name__ for o in outer.optimizers] == ["Adam", "SGD", "AdamW"]
    assert outer.kind == "Combined(Adam, SGD, AdamW)"


@pytest.mark.parametrize("spoil", ["averaged", "lr"])
def test_combined_makes_the_steps_of_all_or_of_none(spoil):
    a, b = (mt.tensor(np.ones(3), requires_grad=True) for _ in range(2))
    last = optim.AdamWScheduleFree([b])
    both = optim.Combined(optim.SGD([a], lr=0.1), last)
    mt.sum(a * a + b * b).backward()
    with last.averaged() if spoil == "averaged" else contextlib.nullcontext():
        if spoil == "lr":
            last.param_groups[0]["lr"] = -1.0
        with pytest.raises((RuntimeError, ValueError), match=r"averaged\(\)|lr is -1"):
            both.step()
    assert (a.numpy() == 1).all()
    last.param_groups[0]["lr"] = 0.1
    both.step()
    assert (a.numpy() == np.float64(1) - 0.1 * 2).all()
