"""What is captured: NumPy's functions on values of the graph, what a function may ask of a value and return."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend
from minitorch_dist.autodiff.primitive import lower
from minitorch_dist.compiler import capture
from minitorch_dist.parallel.sharding import sharded

from .compare import EMITS, arrays, check, identical, near

EMIT = pytest.mark.parametrize("emit", EMITS)
X = np.random.default_rng(0).standard_normal((5, 4))
IDS = np.array([[2, 0, 1], [4, 4, 3]])

NUMPYS = {      # on raw arrays
    "ufuncs": lambda x: np.exp(x) + np.sqrt(np.abs(x)) * np.maximum(x, 0.0) - np.sign(x) % 2.0,
    "ufuncs that are no ops": lambda x: np.arctan(x) + np.hypot(x, 2.0) * np.cbrt(x),
    "operators": lambda x: (-x + 1) * 2 / 3 - x ** 2 + (x > 0) * (x @ x.T)[:, :4] + abs(x) // 2,
    "methods": lambda x: x.sum(0) + x.mean(axis=0) * x.max() - x.min(1).sum() + x.T.reshape(5, 4).sum(-1).prod(),
    "where": lambda x: np.where(x > 0, x, -x * 2),
    "shapes": lambda x: np.transpose(x.reshape(2, 10))[::2] + np.expand_dims(x[:, 0], 1) + np.squeeze(x[None])[:, :2],
    "joined": lambda x: np.concatenate([x, np.zeros_like(x), np.ones_like(x)], 1) + np.stack([x, x], 1).reshape(5, 8)[
        :, [0] * 12],
    "sorted": lambda x: np.sort(x, 1) + np.take_along_axis(x, np.argsort(x, 1), 1) + np.flip(x, 0),
    "broadcast": lambda x: np.broadcast_to(x[0], (3, 4)) + np.arange(4.0),
    "attributes": lambda x: x * x.size + x.ndim - len(x) + x.shape[1] * x.itemsize + x.nbytes,
    "casts": lambda x: x.astype(np.float32) * np.float32(2) + (x > 0).astype(np.int64),
    "integers": lambda x: (x > 0).sum(1) + x.argmax(1) * (x > 0).any(1) - (x > 0).all(),
    "iteration": lambda x: sum(row * i for i, row in enumerate(x)),
}


@EMIT
@pytest.mark.parametrize("name", NUMPYS)
def test_numpys_functions(name, emit):
    function = NUMPYS[name]
    compiled = mt.compile(function, emit=emit)
    for x in (X, X[::-1] * 2):
        expected, found = function(x), compiled(x)
        assert type(found) is type(expected) is np.ndarray
        near(found, expected, name)
        assert type(found) is np.ndarray
    assert not compiled.breaks


def test_ufuncs_that_are_ops():
    """In a compiled function and on a mesh: also those whose op does it otherwise than the ufunc."""
    names = """abs add ceil cos divide equal exp expm1 floor floor_divide greater greater_equal isfinite isnan less
        less_equal log log1p logical_and logical_not logical_or logical_xor matmul maximum minimum multiply negative
        not_equal power remainder sign sin sqrt square subtract tanh""".split()
    for table in (capture.BY_UFUNC, sharded.BY_UFUNC):
        assert set(table) == {getattr(np, name) for name in names}
        assert table[np.power].name == "power" and table[np.remainder].name == "mod"


@EMIT
def test_scalars_come_back_as_scalars(emit):
    compiled = mt.compile(lambda x: x.sum() * 2.0, emit=emit)
    found = compiled(X)
    assert type(found) is np.float64 and abs(found - X.sum() * 2) < 1e-12


@EMIT
def test_numpys_scalars_are_viewed_and_cast_as_ever(emit):
    def f(x):
        return [x + mt.reshape(np.float64(3), (1, 1)), mt.broadcast_to(np.float32(2), (2, 3)),
                mt.transpose(np.int64(2)), mt.stack([np.float64(4), np.float64(5)]) * x[0, 0],
                x * mt.astype(np.float32(0.1), np.float64), mt.astype(np.float64(0.1), np.float32)]
    check(f, X, emit=emit, compare=identical)


@EMIT
def test_integer_arguments_and_indices(emit):
    def f(x, ids):
        rows = mt.embedding(ids, x)
        return [rows, x[ids[0]], ids * 2 + 1, mt.equal(ids, 4), rows * ids[..., None], x[ids[0, 0]], x[1:, ids[0] % 4]]
    check(f, X, IDS, emit=emit)
    compiled = mt.compile(f, emit=emit)
    for ids in (IDS, IDS[::-1].copy(), IDS * 0):
        for a, b in zip(arrays(compiled(mt.tensor(X), ids)), arrays(f(mt.tensor(X), ids)), strict=True):
            identical(a, b)


@EMIT
def test_labels_and_indices_are_checked_as_ever(emit):
    compiled = mt.compile(lambda x, ids: mt.embedding(ids, x), emit=emit)
    loss = mt.compile(lambda x, ids: mt.nn.cross_entropy(x, ids), emit=emit)
    good = np.array([0, 3, 1, 2, 2])
    compiled(mt.tensor(X), good)
    near(arrays(loss(mt.tensor(X), good))[0], arrays(mt.nn.cross_entropy(mt.tensor(X), good))[0])
    for function, eager in ((compiled, lambda x, ids: mt.embedding(ids, x)), (loss, mt.nn.cross_entropy)):
        for bad in (good + 7, good - 9):
            with pytest.raises((IndexError, ValueError)) as expected:
                eager(mt.tensor(X), bad)
            with pytest.raises(expected.type, match=str(expected.value).split()[0]):
                function(mt.tensor(X), bad)
    near(arrays(loss(mt.tensor(X), good))[0], arrays(mt.nn.cross_entropy(mt.tensor(X), good))[0])


@EMIT
def test_writes_by_assign_happen_once_per_call(emit):
    total, times = np.zeros(4), np.zeros(1)

    def f(x):
        y = mt.exp(x)
        backend.assign(total, lower(mt.sum(y, 0)))
        return y * 2.0
    compiled = mt.compile(f, emit=emit)
    for factor in (1.0, 2.0, 3.0):
        compiled(mt.tensor(X * factor))
        times += 1
        np.testing.assert_allclose(total, np.exp(X * factor).sum(0), rtol=1e-13)
    assert not compiled.breaks


@EMIT
def test_captured_while_gradients_are_off_and_then_on(emit):
    """Each has a graph; what stands in no_grad inside of the function has no gradient."""
    def f(x):
        with mt.no_grad():
            top = mt.max(x, 1, keepdims=True)
        return mt.exp(x - top) * mt.stop_gradient(mt.sin(x)) + x.detach()
    check(f, X, emit=emit)


@EMIT
def test_a_function_that_needs_no_array(emit):
    """Constants, an empty result, an argument handed through."""
    compiled = mt.compile(lambda x, n: (x, n, None, "text", mt.ones(3) * 2.0, []), emit=emit)
    x = mt.tensor(X, requires_grad=True)
    for _ in range(2):
        y, n, *rest = compiled(x, 3)
        assert n == 3 and rest[:2] == [None, "text"] and rest[3] == []
        np.testing.assert_array_equal(rest[2].numpy(), [2, 2, 2])
        np.testing.assert_array_equal(y.numpy(), X)
        x.grad = None
        (y * 2.0).sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), np.full(X.shape, 2.0))
