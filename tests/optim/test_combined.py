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


@pytest.mark.parametrize("later", [lambda groups, p: groups.append({**groups[0], "params": [p]}),
                                   lambda groups, p: groups[0]["params"].append(p)], ids=["a group", "a parameter"])
def test_parameters_that_come_later_have_an_optimizer_of_their_own(later):
    """In param_groups they would never be updated."""
    old, new = (mt.tensor(np.ones(3), requires_grad=True) for _ in range(2))
    optimizer = optim.SGD([old], lr=0.5, momentum=0.9)
    both = optim.Combined(optimizer, optim.SGD([new], lr=0.5, momentum=0.9))
    for p in (old, new):
        p.grad = mt.tensor(np.ones(3))
    both.step()
    np.testing.assert_array_equal([old.numpy(), new.numpy()], np.full((2, 3), 0.5))
    later(optimizer.param_groups, new)
    with pytest.raises(RuntimeError, match=r"SGD.step: param_groups have 2 parameters, and had 1 when .*Combined\("):
        both.step()
    np.testing.assert_array_equal([old.numpy(), new.numpy()], np.full((2, 3), 0.5))
