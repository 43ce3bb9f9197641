"""Learning-rate schedules against their formulas."""

import math

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import optim
from minitorch_dist.flat import FlatBuffer


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


def test_linear_is_a_line():
    factor = optim.linear(30, warmup=10, final=0.2)
    np.testing.assert_allclose([factor(t) for t in range(10)], np.arange(1, 11) / 10, rtol=1e-15)
    np.testing.assert_allclose([factor(10 + t) for t in range(21)], np.linspace(1, 0.2, 21), rtol=1e-15)
    assert factor(31) == factor(500) == factor(30) == 0.2


def test_warmup_stable_decay_is_the_papers():
    """Of Hägele et al.: f(n) = 1 - √((n - (N - N_decay)) / N_decay) over the last N_decay of N."""
    factor = optim.warmup_stable_decay(100, warmup=4, decay=25)
    assert [factor(t) for t in range(4)] == [0.25, 0.5, 0.75, 1] and {factor(t) for t in range(4, 76)} == {1}
    np.testing.assert_allclose([factor(t) for t in range(75, 101)], 1 - np.sqrt(np.arange(26) / 25), atol=1e-15)
    assert factor(101) == 0
    ended = optim.warmup_stable_decay(100, final=0.1)       # a fifth
    assert ended(79) == ended(80) == 1 > ended(81) and math.isclose(ended(85), 0.1 + 0.9 * 0.5)
    assert math.isclose(ended(100), 0.1)
    assert [optim.warmup_stable_decay(10, 9)(t) for t in (8, 9, 10)] == [1, 1, 0]


def test_until_the_decay_a_run_may_become_longer():
    short, long = optim.warmup_stable_decay(100, 10, 20), optim.warmup_stable_decay(300, 10)
    assert all(short(t) == long(t) for t in range(81)) and short(81) != long(81)


@pytest.mark.parametrize("name", optim.SCHEDULES)
def test_every_schedule_warms_up_alike_and_falls_to_its_end_or_not_at_all(name):
    factor = optim.SCHEDULES[name](50, 8, 0.25)
    rates = [factor(t) for t in range(60)]
    assert rates[:8] == [t / 8 for t in range(1, 9)] and rates[8] == 1 and all(type(rate) is float for rate in rates)
    assert rates[8:] == sorted(rates[8:], reverse=True)
    assert rates[50:] == pytest.approx([1 if name == "constant" else 0.25] * 10, abs=1e-15)


@pytest.mark.parametrize("schedule", [optim.cosine, optim.linear, optim.warmup_stable_decay])
@pytest.mark.parametrize(("total", "warmup"), [(0, 0), (10, 10), (10, 11), (10, -1)])
def test_what_leaves_no_fall_raises(schedule, total, warmup):
    with pytest.raises(ValueError, match=f"{schedule.__name__}: .*warmup.* {warmup} of {total}"):
        schedule(total, warmup)


@pytest.mark.parametrize("decay", [0, -1, 7, float("nan")])
def test_a_decay_must_fit(decay):
    with pytest.raises(ValueError, match=f"decay is {decay} and warmup 4 of 10 steps"):
        optim.warmup_stable_decay(10, 4, decay)
    with pytest.raises(ValueError, match="warmup is -1"):
        optim.constant(-1)


@pytest.mark.parametrize(("schedule", "args", "words"), [
    (optim.cosine, (10, "3"), "cosine: warmup is '3'"), (optim.cosine, ("10",), "cosine: total is '10'"),
    (optim.linear, (10, 2, None), "linear: final is None"), (optim.constant, ([1],), r"constant: warmup is \[1\]"),
    (optim.warmup_stable_decay, (10, 2, "x"), "decay is 'x'")],
    ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_is_no_number_raises(schedule, args, words):
    with pytest.raises(TypeError, match=f"{words}; it must be a number"):
        schedule(*args)


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


@pytest.mark.parametrize("make", [lambda p: optim.SGD([p], lr=2.0), lambda p: optim.Combined(optim.SGD([p], lr=2.0))])
def test_a_schedule_that_is_made_after_its_optimizer_s_state_was_loaded(make):
    """Its rates would begin with those of when it was saved."""
    first, then, late = (make(parameter()) for _ in range(3))
    optim.LambdaLR(first, lambda step: 1 / (step + 1)).go_to(3)
    schedule = optim.LambdaLR(then, lambda step: 1 / (step + 1))
    for optimizer in then, late:
        optimizer.load_state_dict(first.state_dict())
    assert late.lr == 0.5
    with pytest.raises(RuntimeError, match=r"loaded, and its lr, 0.5, is that of when .* before, .* go_to\(steps\)"):
        optim.LambdaLR(late, lambda step: 1 / (step + 1))
    schedule.go_to(4)
    assert then.lr == 0.4


def test_a_schedule_may_be_made_after_parameters_have_moved():
    p = parameter()
    optimizer = optim.SGD([p], lr=2.0, momentum=0.9)
    FlatBuffer([p])
    p.grad = mt.tensor(np.ones(3, np.float32))
    optimizer.step()
    assert not optim.LambdaLR(optimizer, lambda step: 1.0).steps and optimizer.lr == 2.0


@pytest.mark.parametrize(("factor", "says"), [
    (lambda step: 1.5 - step, r"lr_lambda\(2\) is -0.5; it must be at least 0"), (lambda step: math.nan, "is nan"),
    (lambda step: None, r"lr_lambda\(0\) is None"), (lambda step: "1", r"lr_lambda\(0\) is '1'"),
    ([lambda step: 1.0], "one function of the step for all of its groups; got SGD and list")])
def test_a_factor_that_is_none_is_told(factor, says):
    optimizer = optim.SGD([parameter()], lr=2.0)
    with pytest.raises((ValueError, TypeError), match=says):
        optim.LambdaLR(optimizer, factor).go_to(2)
    assert optimizer.lr >= 0
    with pytest.raises(TypeError, match="takes an optimizer, and one function .*; got list and function"):
        optim.LambdaLR([optimizer], lambda step: 1.0)


@pytest.mark.parametrize("rate", [-0.1, math.nan, None, "0.1"], ids=str)
@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW])
def test_a_rate_that_is_none_is_told_before_anything_is_updated(make, rate):
    p, q = parameter(), parameter(2)
    optimizer = make([{"params": [p]}, {"params": [q]}], lr=0.5)
    p.grad, q.grad = (mt.tensor(np.ones(n, np.float32)) for n in (3, 2))
    optimizer.param_groups[1]["lr"] = rate
    with pytest.raises(ValueError, match=f"lr is {rate!r}; it must be at least 0"):
        optimizer.step()
    assert not p.numpy().any() and not q.numpy().any()
