"""Samples for every entry of the op table: functions and arguments whose true gradients are far from 0.

Dimensions are unequal, so that a wrong axis can't pass; arguments keep away from
kinks and poles by more than a finite difference's step. `covers` is the table
entry that the sample tests; test_table.py fails on an entry without one.
"""

from dataclasses import dataclass

import numpy as np

import minitorch_dist as mt

rng = np.random.default_rng(7)


@dataclass
class Sample:
    covers: str
    function: object
    args: tuple
    label: str = ""

    @property
    def id(self):
        return f"{self.covers}-{self.label}" if self.label else self.covers


def normal(*shape):
    return rng.standard_normal(shape)


def positive(*shape):
    return rng.uniform(0.5, 2.0, shape)


def away_from_zero(*shape):
    return rng.choice([-1.0, 1.0], shape) * rng.uniform(0.4, 2.0, shape)


def distinct(*shape):
    """Values at least 0.1 apart: no finite difference changes their order."""
    return (rng.permutation(int(np.prod(shape))) * 0.1 + rng.uniform(0, 0.02, int(np.prod(shape)))).reshape(shape) - 0.5


LABELS = np.array([2, 0, 4])
ROWS = np.array([2, 0, 0, 1])
ORDER = np.argsort(normal(3, 4), 1)
MASK = np.array([[True, False, True, True], [False, True, True, False], [True, True, False, False]])

SAMPLES = [
    # elementwise, with broadcasting both ways
    *(Sample(name, getattr(mt, name), (a, b), label)
      for name in ("add", "sub", "mul")
      for label, a, b in (("same", normal(3, 4), normal(3, 4)), ("row", normal(3, 4), normal(4)),
                          ("outer", normal(3, 1), normal(1, 4)), ("0-d", normal(), normal(2, 3)))),
    *(Sample("div", mt.div, (a, b), label)
      for label, a, b in (("same", normal(3, 4), away_from_zero(3, 4)),
                          ("column", normal(2, 3), away_from_zero(2, 1)))),
    Sample("power", mt.power, (positive(3, 4), normal(4))),
    Sample("power", lambda x: x ** 3, (normal(3, 4),), "number"),
    Sample("power", lambda x: 2.0 ** x, (normal(3, 4),), "of a number"),
    Sample("maximum", mt.maximum, (distinct(3, 4), distinct(3, 4) + 0.05)),
    Sample("maximum", lambda x: mt.maximum(x, 0.3), (distinct(5, 3),), "number"),
    Sample("minimum", mt.minimum, (distinct(3, 4), distinct(4) + 0.05)),
    *(Sample(name, getattr(mt, name), (normal(3, 5),)) for name in
      ("exp", "expm1", "sin", "cos", "tanh", "sigmoid", "neg")),
    *(Sample(name, getattr(mt, name), (positive(3, 5),)) for name in ("log", "log1p", "sqrt")),
    Sample("relu", mt.relu, (away_from_zero(3, 5),)),
    Sample("abs", mt.absolute, (away_from_zero(3, 5),)),
    Sample("where", lambda x, y: mt.where(MASK, x, y), (normal(3, 4), normal(4))),
    Sample("astype", lambda x: mt.astype(mt.exp(mt.astype(x, np.float64)), np.float64), (normal(2, 3),), "same"),
    # shape
    Sample("reshape", lambda x: mt.exp(mt.reshape(x, (2, 6))), (normal(3, 4),)),
    Sample("reshape", lambda x: mt.sin(mt.reshape(x, -1, 2)), (normal(3, 4),), "unknown"),
    Sample("transpose", lambda x: mt.exp(mt.transpose(x, (2, 0, 1))), (normal(2, 3, 4),)),
    Sample("transpose", lambda x: mt.sin(mt.transpose(x, (1, 2, 0))), (normal(2, 3, 4),), "cycle"),
    Sample("concatenate_2", lambda x, y: mt.exp(mt.concatenate([x, y], 1)), (normal(2, 3), normal(2, 1))),
    Sample("split", lambda x: (lambda a, b, c: mt.exp(a) * mt.sin(c))(*mt.split(x, (2, 1, 2), 1)), (normal(3, 5),)),
    Sample("pick", lambda x: mt.exp(mt.split(x, (1, 4))[1]), (normal(5, 2),)),
    # reductions
    Sample("sum", lambda x: mt.exp(mt.sum(x, 1)), (normal(3, 4),), "axis"),
    Sample("sum", lambda x: mt.exp(mt.sum(x, (0, -1), keepdims=True)), (normal(2, 3, 2),), "axes"),
    Sample("sum", mt.sum, (normal(3, 4),), "all"),
    Sample("broadcast_to", lambda x: mt.sin(mt.broadcast_to(x, (4, 2, 3))), (normal(2, 1),)),
    *(Sample(name, lambda x, name=name: getattr(mt, name)(x, 1) * getattr(mt, name)(x), (distinct(3, 4),))
      for name in ("max", "min")),
    Sample("max", lambda x: mt.max(x, (0, 2), keepdims=True), (distinct(2, 3, 4),), "axes"),
    # indexing
    Sample("getitem", lambda x: mt.exp(x[1:, ::-2]), (normal(3, 5),), "slices"),
    Sample("getitem", lambda x: mt.exp(x[ROWS]) * x[1], (normal(3, 4),), "repeated"),
    Sample("getitem", lambda x: mt.sin(x[MASK]), (normal(3, 4),), "mask"),
    Sample("getitem", lambda x: mt.sin(x[..., None, LABELS]), (normal(2, 5),), "mixed"),
    Sample("scatter_add", lambda x: mt.exp(mt.scatter_add(x, ROWS, (3, 2))), (normal(4, 2),)),
    Sample("take_along_axis", lambda x: mt.exp(mt.take_along_axis(x, ORDER, 1)), (normal(3, 4),)),
    Sample("sort", lambda x: mt.sort(x, 0) * np.arange(12.0).reshape(3, 4), (distinct(3, 4),)),
    # contractions
    *(Sample("matmul", mt.matmul, (normal(*a), normal(*b)), f"{a}@{b}") for a, b in (
        ((2, 3), (3, 4)), ((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 2)), ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 4)),
        ((5, 1, 2, 3), (4, 3, 2)), ((3,), (2, 3, 4)), ((2, 4, 3), (3,)))),
    Sample("linear", mt.linear, (normal(3, 4), normal(2, 4), normal(2))),
    Sample("linear", mt.linear, (normal(2, 3, 4), normal(5, 4), normal(5)), "3-d"),
    # fused and composed
    Sample("softmax_cross_entropy", lambda z: mt.softmax_cross_entropy(z, LABELS), (normal(3, 5),)),
    Sample("softmax", lambda z: mt.softmax(z, 0), (normal(3, 4),)),
    Sample("log_softmax", mt.log_softmax, (normal(3, 4),)),
    Sample("logsumexp", lambda z: mt.logsumexp(z, (0, 2)), (normal(2, 3, 4),)),
    Sample("var", lambda x: mt.var(x, 0, correction=1) * mt.std(x), (normal(3, 4),)),
    Sample("mean", lambda x: mt.exp(mt.mean(x, 1, keepdims=True)), (normal(3, 4),)),
    Sample("at", lambda x, v: mt.exp(mt.ops.indexing.At(x)[1:, 2].set(v)) * x, (normal(3, 4), normal(2)), "set"),
    Sample("at", lambda x, v: mt.exp(mt.ops.indexing.At(x)[ROWS].add(v)), (normal(3, 2), normal(4, 2)), "add"),
]

# They have no derivative: constants of the level below.
CONSTANT = {"sign", "floor", "greater", "greater_equal", "less", "less_equal", "equal", "not_equal", "argmax"}
