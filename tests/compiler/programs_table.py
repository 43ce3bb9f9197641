"""A table of programs, each run with mt.compile and without."""

import warnings

import numpy as np

import minitorch_dist as mt

from .compare import arrays, near


class Programs(dict):
    """{name: program(wrap)}, which gives what it computed; wrap is mt.compile or nothing."""

    def __call__(self, function):
        """As a decorator: one more."""
        self[function.__name__] = function
        return function

    def check(self, name, emit="numpy"):
        """The same numbers compiled and not, and it was compiled; returns the compiled functions."""
        wrap = Seen(emit)
        mt.manual_seed(5)
        expected = arrays(self[name](lambda function: function))
        mt.manual_seed(5)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*runs uncompiled")
            found = arrays(self[name](wrap))
        assert len(found) == len(expected) > 0
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), i
            near(a, b, f"result {i}")
        return wrap.made


class Seen:
    """mt.compile that remembers what it has made."""

    def __init__(self, emit):
        self.emit, self.made = emit, []

    def __call__(self, function):
        self.made.append(mt.compile(function, emit=self.emit))
        return self.made[-1]


def grad(function, x):
    """(value, gradient of its sum) at an array."""
    x = mt.tensor(x, requires_grad=True)
    y = function(x)
    if y.requires_grad:
        y.sum().backward()
    return y.numpy(), np.zeros(0) if x.grad is None else x.grad.numpy()
