"""Learning-rate schedules against their formulas."""

import math

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import optim


def parameter(n=3):
    return mt.tensor(np.zeros(n, np.float32), requires_grad=True)


def test_cosine_is_the_papers():
    """SGDR eq. 5: η = ηmin + ½(ηmax - ηmin)(1 + cos(π T/Tmax))."""
    factor = optim.cosine(40, final=0.1)
    for t in range(41):
        assert math.isclose(factor(t), 0.1 + 0.5 * 0.9 * (1 + math.cos(math.pi * t / 40)), rel_tol=1e-15)
    assert factor(0) == 1 and math.isclose(factor(20), 0.55) and math.isclose(factor(40), 0.1)
    assert factor(41) == factor(1000) == factor(40)
    assert optim.cosine(1)(0) == 1 and optim.cosine(1)(1) == 0


def test_warmup_rises_linearly_and_meets_the_cosine():
    factor = optim.cosine(25, warmup=5)
    np.testing.assert_allclose([factor(t) for t in range(5)], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-15)
    np.testing.assert_allclose([factor(5 + t) for t in range(21)], [optim.cosine(20)(t) for t in range(21)], rtol=1e-15)
    assert all(factor(t) > factor(t + 1) for t in range(5, 25))


@pytest.mark.parametrize(("total", "warmup"), [(0, 0), (10, 10), (10, 11), (10, -1)])
def test_what_leaves_no_cosine_raises(total, warmup):
    with pytest.raises(ValueError, match=f"{warmup} of {total}"):
        optim.cosine(total, warmup)


def test_the_rate_of_every_group_follows():
    optimizer = optim.SGD([{"params": parameter(), "lr": 0.5}, {"params": parameter()}], lr=0.01)
    schedule = optim.LambdaLR(optimizer, optim.cosine(10, warmup=2))
    for t in range(12):
        rates = [group["lr"] for group in optimizer.param_groups]
        np.testing.assert_allclose(rates, [0.5 * optim.cosine(10, 2)(t), 0.01 * optim.cosine(10, 2)(t)], rtol=1e-15)
        assert all(type(rate) is float for rate in rates)      # a NumPy float64 would widen float32 arithmetic
        schedule.step()


def test_the_steps_that_are_made_have_the_scheduled_rates():
    p = parameter()
    optimizer = optim.SGD([p], lr=2.0)
    schedule = optim.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    p.grad = mt.tensor(np.ones(3, np.float32))
    for _ in range(4):
        optimizer.step()
        schedule.step()
    np.testing.assert_allclose(p.numpy(), -2 * (1 + 1 / 2 + 1 / 3 + 1 / 4), rtol=1e-6)


def test_constant():
    optimizer = optim.Adam([parameter()], lr=0.3)
    schedule = optim.LambdaLR(optimizer, optim.constant())
    for _ in range(5):
        schedule.step()
    assert optimizer.lr == 0.3
