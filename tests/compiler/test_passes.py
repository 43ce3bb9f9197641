"""Rewrites do what they say where they may, and nothing where they mayn't; which ops join a kernel."""

from collections import Counter

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.compiler import fusion

from .compare import EMITS, arrays, check, identical

X = np.random.default_rng(0).standard_normal((4, 6))
F32 = X.astype(np.float32)


def ops(function, *args, stage="graph"):
    """How often each op stands in a graph; the function gives what it gives uncompiled, to the last bit."""
    compiled = mt.compile(function, emit="numpy")
    for a, b in zip(arrays(compiled(*map(mt.tensor, args))), arrays(function(*map(mt.tensor, args))), strict=True):
        identical(a, b)
    assert not compiled.breaks
    return Counter(node.name for node in getattr(compiled.variants[0], stage).nodes)


GONE = {        # name -> (function, argument, what is left)
    "reshapes": (lambda x: mt.exp(mt.reshape(mt.reshape(mt.reshape(x, (2, 12)), (24,)), (3, 8))), X, "reshape exp"),
    "reshape to itself": (lambda x: mt.exp(mt.reshape(x, (4, 6))), X, "exp"),
    "transposes": (lambda x: mt.exp(mt.transpose(mt.transpose(x))), X, "exp"),
    "turned thrice": (lambda x: mt.exp(mt.transpose(mt.transpose(mt.reshape(x, (2, 3, 4)), (1, 2, 0)), (1, 2, 0))), X,
                      "reshape transpose exp"),
    "broadcast to itself": (lambda x: mt.exp(mt.broadcast_to(x, (4, 6))), X, "exp"),
    "square": (lambda x: x ** 2, X, "square"),
    "cube": (lambda x: x ** 3, X, "square mul"), "fourth power": (lambda x: x ** 4.0, X, "square mul"),
    "first power": (lambda x: mt.exp(x ** 1), X, "exp"),
    "times one": (lambda x: mt.exp(1 * x * 1.0 / 1), X, "exp"),
    "casts there and back": (lambda x: mt.exp(mt.astype(mt.astype(x, np.float64), np.float32)), F32, "exp"),
    "the same twice": (lambda x: mt.exp(x * 2.0) + mt.exp(x * 2.0), X, "mul exp add"),
    "for nothing": (lambda x: (mt.sin(x), mt.exp(x))[1], X, "exp"),
}
STAYS = {
    "a cast that loses": (lambda x: mt.exp(mt.astype(mt.astype(x, np.float32), np.float64)), X, "astype astype exp"),
    "a cast that floors": (lambda x: mt.exp(mt.astype(mt.astype(x * 3.0, np.int64), np.float64)), X,
                           "mul astype astype exp"),
    "a strong one": (lambda x: x * np.float64(1), F32, "mul"),
    "one of a shape": (lambda x: x * mt.ones((3, 4, 6)), F32, "mul"),
    "an integer's division": (lambda x: mt.astype(x, np.int64) / 1, X, "astype div"),
    "one over": (lambda x: 1 / x, X, "div"),
    "zero": (lambda x: x + 0.0, X, "add"),      # -0.0 + 0.0 is 0.0
    "a strong two": (lambda x: x ** np.float64(2), F32, "power"),
    "True": (lambda x: x * True, X, "mul"),
    "nearly the same": (lambda x: mt.exp(x * 2.0) + mt.exp(x * 2), F32, "mul mul exp exp add"),
    "zeros of two signs": (lambda x: (x * 0.0) / (x * -0.0), X, "mul mul div"),
    "int and float": (lambda x: mt.astype(x, np.int64) * 2 + mt.astype(x, np.int64) * 2.0, X, "astype mul mul add"),
}


@pytest.mark.parametrize("name", GONE | STAYS)
def test_what_is_left(name):
    function, x, left = (GONE | STAYS)[name]
    with np.errstate(all="ignore"):
        assert ops(function, x) == Counter(left.split())


@pytest.mark.parametrize("name", [name for name in GONE if name not in (
    "square", "cube", "fourth power", "broadcast to itself")])
def test_more_was_captured(name):
    function, x, left = GONE[name]
    assert ops(function, x, stage="captured").total() > len(left.split())


def test_random_numbers_are_not_the_same_twice():
    mt.manual_seed(0)
    compiled = mt.compile(lambda x: (mt.dropout(x, 0.5), mt.dropout(x, 0.5)), emit="numpy")
    a, b = arrays(compiled(mt.tensor(np.ones((4, 50)))))
    assert not np.array_equal(a, b)


def test_random_numbers_that_nobody_needs_are_drawn_still():
    """The stream stands afterwards where eager's stands."""
    results = []
    for wrap in (lambda f: mt.compile(f, emit="numpy"), lambda f: f):
        mt.manual_seed(0)
        f = wrap(lambda x: (mt.dropout(x, 0.5), mt.dropout(x, 0.3))[1])
        results.append([*arrays([f(mt.tensor(X)), f(mt.tensor(X))]), mt.randn(2).numpy()])
    for a, b in zip(*results, strict=True):
        identical(a, b)


def kernels(function, *args):
    """The kernels' roles, as a list of Counters."""
    compiled = check(function, *args, emit="c")
    return [Counter(k.roles.values()) for k in compiled.variants[0].forward_program.schedule.kernels]


def test_roles():
    assert kernels(lambda x: mt.exp(x) * 2.0, X) == [{"full": 2}]
    assert kernels(lambda x: mt.sum(mt.exp(x), 1), X) == [{"full": 1, "row": 1}]
    assert kernels(lambda x: mt.sum(mt.exp(x), 0), X) == [{"full": 1, "column": 1}]
    assert kernels(lambda x: mt.sum(mt.exp(x)), X) == [{"full": 1, "scalar": 1}]
    assert kernels(lambda x: mt.exp(mt.max(x, 1, keepdims=True) - x), X) == [{"full": 2, "row": 1}]


@pytest.mark.parametrize("emit", EMITS)
def test_rows_that_are_spread_out_and_summed(emit):
    """One number per row, as a row of equal numbers, and the sum of those."""
    def f(x):
        row = mt.broadcast_to(mt.exp(mt.max(x, 1, keepdims=True)), (4, 6))
        return mt.sum(row, 1), mt.sum(row * x, 0), mt.sum(row), row, mt.max(row, 1), mt.sum(mt.reshape(row, (8, 3)), 1)
    check(f, X, emit=emit)


def test_what_must_wait_is_in_a_later_kernel():
    """A sum over all rows is complete at the end only; a product stands between."""
    assert len(kernels(lambda x: mt.exp(x - mt.sum(mt.sin(x), 0)), X)) == 2
    assert len(kernels(lambda x: mt.exp(x / mt.sum(mt.square(x))), X)) == 2
    assert len(kernels(lambda x: mt.exp(mt.exp(x) @ mt.transpose(mt.exp(x))), X)) == 2
    assert len(kernels(lambda x: mt.sin(x) + mt.tanh(mt.exp(mt.sin(x)) @ np.eye(6)), X)) == 2


def test_no_kernel_needs_what_comes_after_it():
    """a joins b's kernel, c needs a and is needed by b: the ring is seen."""
    def f(x):
        a = mt.exp(x)
        c = mt.sin(a @ np.ones((6, 6)))
        b = mt.tanh(a) * c
        return b + mt.sum(c, 0), mt.cos(a)
    check(f, X, emit="c")
    compiled = mt.compile(f, emit="c")
    compiled(mt.tensor(X))
    known = set(compiled.variants[0].graph.given)
    for item in compiled.variants[0].forward_program.schedule.items:
        nodes = fusion.nodes_of(item)
        for node in nodes:
            assert known | {v for n in nodes for v in n.results} >= set(node.inputs)
        known |= {v for node in nodes for v in node.results}
