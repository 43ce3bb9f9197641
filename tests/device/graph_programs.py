"""What the tests of programs with cuda_graph share: a table of programs, and how one is compared with and without."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import nn


class Programs(dict):
    """{name: program(wrap)}, which gives what it computed; `recorded` holds the names of those of which graphs must
    have been made."""

    def __init__(self):
        self.recorded = set()

    def __call__(self, function=None, *, recorded=True):
        """As a decorator: one more."""
        if function is None:
            return lambda function: self(function, recorded=recorded)
        self[function.__name__] = function
        if recorded:
            self.recorded.add(function.__name__)
        return function

    def check(self, name):
        """The same numbers with graphs and without; returns whether graphs were made exactly where they must be."""
        wrap = Seen()
        with np.errstate(all="ignore"):
            assert_equal(self[name](wrap), self[name](lambda function: function))
        return any(f.graphs for f in wrap.made) == (name in self.recorded)


def values(tree):
    """Arrays and tensors as NumPy's, in any nesting."""
    if isinstance(tree, dict):
        return [(key, values(value)) for key, value in tree.items()]
    if isinstance(tree, (list, tuple)):
        return [values(value) for value in tree]
    if isinstance(tree, mt.Tensor):
        return np.array(tree.cpu().numpy())
    return tree.get() if hasattr(tree, "get") else tree


def grads(model):
    return values([p.grad for p in model.parameters()])


def net(seed=1, layers=None):
    mt.manual_seed(seed)
    return (layers or nn.Linear)(4, 3).to("cuda")


def assert_equal(found, expected):
    assert type(found) is type(expected)
    if isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_equal(a, b)
    else:
        np.testing.assert_array_equal(found, expected)


class Seen:
    """mt.cuda_graph that remembers what it has made."""

    def __init__(self):
        self.made = []

    def __call__(self, function):
        self.made.append(mt.cuda_graph(function))
        return self.made[-1]
