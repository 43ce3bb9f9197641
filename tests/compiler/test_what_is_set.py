"""What a function sets itself, and what is set between its calls: caches, counts, histories, settings that change."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.compiler import compiled

from .test_staleness import X


class Attribute(nn.Module):
    kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = MADE[self.kind](len(x))
        return mt.exp(x) * self.kept


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = {}

    def forward(self, x):
        if len(x) not in self.kept:
            self.kept[len(x)] = (len(x), MADE[self.kind](len(x)))
        return mt.exp(x) * self.kept[len(x)][1]


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = [None] * 9

    def forward(self, x):
        self.kept[len(x)] = MADE[self.kind](len(x)) if self.kept[len(x)] is None else self.kept[len(x)]
        return mt.exp(x) * self.kept[len(x)]


def around():
    kept = None

    def f(x):
        nonlocal kept
        if kept is None:
            kept = MADE[f.kind](len(x))
        return mt.exp(x) * kept
    return f


MADE = {"tensor": lambda n: mt.cumsum(mt.ones((n, 1)), 0), "array": lambda n: np.arange(n)[:, None] + 1.0,
        "number": lambda n: n ** -0.5}


@pytest.mark.parametrize("kind", list(MADE))
@pytest.mark.parametrize("made", [Attribute, Table, Listed, around])
def test_a_cache_is_filled_once_and_with_values(made, kind):
    """By the first call, which is run, and captured by the next one: the graph's own values must not stay in it."""
    function = made()
    function.kind = kind
    compiled = mt.compile(function, emit="numpy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            x = X[:3] + step
            wanted = mt.exp(mt.tensor(x)) * MADE[kind](3)
            np.testing.assert_allclose(compiled(mt.tensor(x)).numpy(), wanted.numpy(), rtol=1e-14)
    assert sum(compiled.breaks.values()) == 1
    assert len(getattr(compiled, "compiled", compiled).variants) == 1


def test_what_changes_at_each_call_is_run_each_time():
    """And once only: a capture's own changes are put back."""
    class Carried(nn.Module):
        def __init__(self):
            super().__init__()
            self.state, self.counts, self.seen, self.shapes = mt.zeros((4,), dtype=np.float64), {"calls": 0}, [], set()

        def forward(self, x):
            self.counts["calls"] += 1
            self.counts[f"call {self.counts['calls']}"] = True
            self.seen.append(x.shape)
            self.shapes |= {x.shape, len(self.seen)}
            self.state = mt.tanh(self.state + x.sum(0))
            self.last = self.state * self.counts["calls"]
            return self.last
    found = []
    for wrap in (lambda module: module, lambda module: mt.compile(module, emit="numpy")):
        module = Carried()
        f = wrap(module)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            results = [f(mt.tensor(X[:3])).numpy() for _ in range(5)]
        found.append((results, module.counts, module.seen, module.shapes, module.state.numpy(), module.last.numpy()))
    assert ["changes what it reads" in str(warning.message) for warning in told] == [True]
    assert sum(f.breaks.values()) == 5 and found[0][1:4] == found[1][1:4]
    np.testing.assert_array_equal(np.stack([*found[0][0], *found[0][4:]]), np.stack([*found[1][0], *found[1][4:]]))


def test_a_history_that_no_code_reads_is_no_other_state():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.losses, self.times = [], {}

        def forward(self, x):
            return mt.exp(x)
    model = Model()
    f = mt.compile(model, emit="numpy")
    for step in range(4):
        model.times[step] = len(model.losses)
        model.losses.append(f(mt.tensor(X)).sum().item())
    assert len(f.compiled.variants) == 1


def test_who_is_captured_again_and_again_is_told_why(monkeypatch):
    monkeypatch.setattr(compiled, "VARIANTS", 3)
    settings, step, model, thing = {"rate": 0.0}, 0, nn.Tanh(), SimpleNamespace(rate=0.0)
    functions = {
        r"step was 2 and is 3": lambda x: x * step,
        r"an item of a dict was 2\.0 and is 3\.0": lambda x: x * settings["rate"],
        r"rate was 2\.0 and is 3\.0": lambda x: x * thing.rate, r"Tanh.step was 2 and is 3": lambda x: model(x),
        r"argument 0 was float64 \(2,\) on cpu and is float64 \(3,\)": lambda x: mt.exp(x),
        r"argument 1 was 2 and is 3": lambda x, by: x * by, r"arguments are nested otherwise": lambda *xs: sum(xs)}
    for expected, function in functions.items():
        f = mt.compile(function, emit="numpy")
        for step in range(4):
            settings["rate"] = thing.rate = float(step)
            model.step = step
            x = mt.tensor(X[0, :step] if "float64" in expected else X)
            given = (x, step) if "argument 1" in expected else (x,) * (step + 1) if "nested" in expected else (x,)
            with pytest.warns(UserWarning, match=expected) if step == 3 else warnings.catch_warnings():
                warnings.filterwarnings("error" if step < 3 else "default", message=".*captured once more")
                f(*given)
