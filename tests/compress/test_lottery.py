"""Lottery tickets: what is trained from which values, seen by a training that writes down what it gets."""

import re

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.compress.lottery import lottery_ticket
from tests.crews import crews

from . import prune_cases as cases


def make_model(seed):
    mt.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 20, dtype=np.float64), nn.Tanh(), nn.Linear(20, 2, dtype=np.float64))


class Training:
    """Some steps of least squares; the score is the number of the call."""

    def __init__(self, steps=5):
        self.steps, self.calls = steps, []

    def __call__(self, model, after_step, start):
        begin, history = model.state_dict(), {}
        optimizer = optim.Adam(model.parameters(), 0.05)
        for step in range(start, self.steps):
            random = np.random.default_rng(step)
            optimizer.zero_grad()
            ((model(mt.tensor(random.standard_normal((8, 6)))) - random.standard_normal((8, 2))) ** 2).sum().backward()
            optimizer.step()
            after_step()
            history[step + 1] = model.state_dict()
        self.calls.append((start, begin, history, model.state_dict()))
        return len(self.calls)


def zeros(state, name):
    return state[name] == 0


@pytest.mark.parametrize("rewind", [0, 2])
def test_tickets_and_controls_start_where_they_should(rewind):
    train = Training()
    found = lottery_ticket(make_model, train, 2, 0.5, rewind, controls=(1, 2), seed=7)
    dense, ticket1, again1, random1, ticket2, again2, random2 = train.calls
    assert [(r.ticket, r.reinitialised, r.random) for r in found.rounds] == [(1, None, None), (2, 3, 4), (5, 6, 7)]
    assert [r.kept for r in found.rounds] == [1, 0.5, 0.25]
    start = dense[1] if rewind == 0 else dense[2][rewind]
    other = [make_model(7 + r).state_dict() for r in (1, 2)]
    for name in ("0.weight", "2.weight"):
        before, size = dense, dense[1][name].size
        for r, (ticket, again, random) in enumerate(((ticket1, again1, random1), (ticket2, again2, random2)), 1):
            mask = found.rounds[r].masks[name]
            values = np.abs(before[3][name])
            assert int(mask.sum()) == size >> r and values[mask].min() >= values[~mask].max()
            assert (ticket[1][name] == start[name] * mask).all() and ticket[0] == rewind
            assert (again[1][name] == other[r - 1][name] * mask).all() and again[0] == 0
            gone = zeros(random[1], name)
            assert (random[1][name] == np.where(gone, 0, start[name])).all() and random[0] == rewind
            assert int(gone.sum()) == int((~mask).sum()) and (gone != ~mask).any()
            for call in (ticket, again, random):        # all along
                assert all((zeros(state, name) == zeros(call[1], name)).all() for state in call[2].values())
            before = ticket
    assert (ticket1[1]["0.bias"] == start["0.bias"]).all()
    assert all((found.start[n] == v).all() for n, v in start.items())


def test_controls_come_in_the_last_round_alone_unless_asked_for():
    train = Training(1)
    found = lottery_ticket(make_model, train, 3, 0.2)
    assert [r.reinitialised for r in found.rounds] == [None, None, None, 5] and len(train.calls) == 6
    assert [round(r.kept, 2) for r in found.rounds] == [1, 0.8, 0.64, 0.51]
    lines = str(found).splitlines()
    assert len(lines) == 5 and re.fullmatch(r" +50\.6 % +4 +5 +6", lines[-1])


def test_a_global_scope_may_empty_one_layer_more_than_another():
    found = lottery_ticket(make_model, Training(), 1, 0.5, scope="global")
    masks = found.rounds[1].masks
    assert sum(int(m.sum()) for m in masks.values()) == 80 and masks["0.weight"].mean() != masks["2.weight"].mean()


def test_settings_that_do_not_fit_raise():
    for bad in ({"share": 0.0}, {"share": 1.0}, {"rounds": -1}, {"rewind": -1}):
        with pytest.raises(ValueError, match="lottery_ticket"):
            lottery_ticket(make_model, Training(), **{"rounds": 1, **bad})
    for bad in ({"rewind": 1.5}, {"rounds": 1.5}, {"controls": [0.5]}):
        with pytest.raises(TypeError, match=r"must be a whole number"):
            lottery_ticket(make_model, Training(), **{"rounds": 1, **bad})
    for odd in (0, 2):
        with pytest.raises(ValueError, match=rf"controls \[{odd}\]: there are the rounds 1 to 1"):
            lottery_ticket(make_model, Training(), 1, controls=[odd])
    assert len(lottery_ticket(make_model, Training(), 0).rounds) == 1
    with pytest.raises(ValueError, match="rewind=9, but train has called after_step 5 times"):
        lottery_ticket(make_model, Training(), 1, rewind=9)


def test_two_ranks_find_the_tickets_of_one_process():
    wanted, start = cases.tickets(wrapped=False)
    for rounds, its_start in crews.call("tests.compress.prune_cases:tickets", 2):
        assert [r[-1] for r in rounds] == [r[-1] for r in wanted] and [r[0] for r in rounds] == [1, 0.5, 0.25]
        for got, want in zip(rounds, wanted, strict=True):
            assert got[1:4] == pytest.approx(want[1:4], rel=1e-11) if want[2] else got[1] == pytest.approx(want[1])
        for name, value in start.items():
            np.testing.assert_allclose(its_start[name], value, rtol=0, atol=1e-11)
