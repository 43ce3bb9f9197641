"""Autocast: every op has its class, and runs in the precision of it; regions nest and end."""

import subprocess
import sys

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.autodiff.autocast import CLASSES
from minitorch_dist.autodiff.primitive import state

from .autocast_cases import HEADS, IMAGE, KERNEL, draws, each_dtype, rounded

ALL_OPS = """
import importlib, pkgutil, minitorch_dist
for found in pkgutil.walk_packages(minitorch_dist.__path__, "minitorch_dist."):
    if not found.name.endswith(("__main__", "_child")):
        try:
            importlib.import_module(found.name)
        except ImportError:         # of what isn't installed
            pass
print(*minitorch_dist.OPS)
"""     # in a process of its own: tests enter some, too


def test_each_op_of_the_library_has_one_class():
    names = [name for text in CLASSES.values() for name in text.split()]
    run = subprocess.run([sys.executable, "-c", ALL_OPS], capture_output=True, text=True, check=True, timeout=60)
    assert len(names) == len(set(names)) and sorted(names) == sorted(run.stdout.split())


LOW = {     # by hand, from the list in torch's documentation: op -> (function, shapes)
    "matmul": (mt.matmul, (3, 4), (4, 2)), "vector": (mt.matmul, (3, 4), (4,)), "linear": (mt.linear, (3, 4), (2, 4)),
    "bias": (mt.linear, (3, 4), (2, 4), (2,)), "linear_gelu": (mt.linear_gelu, (3, 4), (2, 4), (2,)),
    "conv2d": (mt.conv2d, IMAGE, KERNEL, (4,)), "conv1d": (mt.conv1d, (2, 3, 7), (4, 3, 2)),
    "conv_transpose": (mt.conv_transpose2d, IMAGE, (3, 2, 2, 2)), "tensordot": (mt.tensordot, (2, 3, 4), (3, 4, 5)),
    "einsum": (lambda x, y: mt.einsum("ij,kj->ik", x, y), (3, 4), (2, 4)),
    "attention": (mt.scaled_dot_product_attention, HEADS, HEADS, HEADS),
}
WIDE = {
    "exp": mt.exp, "log": lambda x: mt.log(mt.square(x) + 1), "pow": lambda x: x ** 3, "softmax": mt.softmax,
    "log_softmax": mt.log_softmax, "sum": mt.sum, "mean": mt.mean, "var": mt.var, "prod": mt.prod, "cumsum": mt.cumsum,
    "rsqrt": lambda x: mt.rsqrt(mt.square(x)), "layer_norm": lambda x: mt.layer_norm(x, 4),
    "dot": lambda x: mt.dot(mt.ravel(x), mt.ravel(x)), "rms_norm": lambda x: mt.rms_norm(x, 4),
    "batch_norm": lambda x: mt.batch_norm(x)[0], "logsumexp": mt.logsumexp,
    "cross_entropy": lambda x: nn.cross_entropy(x, np.arange(3)), "mse": lambda x: nn.mse_loss(x, 2 * x),
}
AS_GIVEN = {
    "relu": mt.relu, "tanh": mt.tanh, "sigmoid": mt.sigmoid, "gelu": mt.gelu, "add": lambda x: x + 1.0, "max": mt.max,
    "swiglu": lambda x: mt.swiglu(x, x),
    "mul": lambda x: x * x, "getitem": lambda x: x[1:], "reshape": lambda x: x.reshape(-1), "sqrt": mt.sqrt,
    "concatenate": lambda x: mt.concatenate([x, x]), "dropout": mt.dropout, "where": lambda x: mt.where(x > 0, x, 0.0),
}


@pytest.mark.parametrize("op", LOW)
@each_dtype
def test_products_run_in_16_bits(op, dtype):
    randn, leaf = draws()
    function, *shapes = LOW[op]
    args = [leaf(*shape) for shape in shapes]
    with mt.autocast(dtype):
        y = function(*args)
        raw = function(*(a.numpy() for a in args))
        wide = function(*(a.astype(np.float64) for a in args))
    assert y.dtype == raw.dtype == dtype and wide.dtype == np.float64
    np.testing.assert_array_equal(y.numpy(), raw)
    y.backward(mt.tensor(randn(*y.shape, dtype=dtype)))
    assert all(a.grad.dtype == np.float32 for a in args)


@pytest.mark.parametrize("op", WIDE)
@each_dtype
def test_what_16_bits_are_too_few_for_runs_in_float32(op, dtype):
    _, leaf = draws()
    x = leaf(3, 4)
    with mt.autocast(dtype):
        y = WIDE[op](x.astype(dtype))
    assert y.dtype == np.float32
    assert WIDE[op](x.astype(dtype)).dtype == dtype
    assert np.any(y.numpy() != rounded(y.numpy(), dtype))       # not only widened afterwards


@pytest.mark.parametrize("op", AS_GIVEN)
@pytest.mark.parametrize("given", ["float16", "bfloat16", "float32", "float64"])
@each_dtype
def test_all_others_take_what_comes(op, given, dtype):
    randn, _ = draws()
    x = mt.tensor(np.abs(randn(3, 4, dtype=given)) + 1)
    with mt.autocast(dtype):
        assert AS_GIVEN[op](x).dtype == given


@each_dtype
def test_mixed_operands_promote(dtype):
    randn, _ = draws()
    low, wide = mt.tensor(randn(3, 4, dtype=dtype)), mt.tensor(randn(3, 4))
    with mt.autocast(dtype):
        for y in (low + wide, wide * low, mt.maximum(low, wide), mt.concatenate([low, wide]),
                  mt.where(wide > 0, low, wide)):
            assert y.dtype == np.float32


@each_dtype
def test_float64_has_the_bits_that_it_has_without(dtype):
    randn, _ = draws()
    mt.manual_seed(2)
    model, x = nn.mlp((7, 6), dtype=np.float64), randn(3, 784, dtype=np.float64)

    def run():
        model.zero_grad()
        nn.cross_entropy(model(x), np.arange(3)).backward()
        return [p.grad.numpy().copy() for p in model.parameters()]
    without = run()
    with mt.autocast(dtype):
        within = run()
    for a, b in zip(without, within, strict=True):
        np.testing.assert_array_equal(a, b)


@each_dtype
def test_a_product_with_float64_has_all_of_its_bits(dtype):
    w, x = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4), np.linspace(1, 2, 8).reshape(4, 2)
    with mt.autocast(dtype):
        found = mt.matmul(mt.tensor(w), mt.tensor(x))
    np.testing.assert_array_equal(found.numpy(), w @ x)


def test_the_table_prints():
    lines = {line[:8].strip(): line[8:].split() for line in mt.autocast_table().splitlines()}
    assert list(lines) == list(CLASSES) and "linear" in lines["16 bits"] and "softmax" in lines["float32"]


@each_dtype
def test_regions_nest_end_and_decorate(dtype):
    randn, _ = draws()
    x = randn(2, 2)

    @mt.autocast(dtype)
    def product():
        return mt.matmul(x, x).dtype
    for _ in range(2):
        assert product() == dtype and state.autocast is None and not state.special
    with mt.autocast(dtype):
        with mt.autocast(enabled=False):
            assert mt.matmul(x, x).dtype == np.float32
        with pytest.raises(ValueError), mt.no_grad():
            mt.matmul(x, x[:1])
        mt.compile(mt.square)(x)
        assert mt.matmul(x, x).dtype == dtype
    assert mt.matmul(x, x).dtype == np.float32 and state.autocast is None
    for wrong in ("float32", "int8", np.float64, "half"):
        with pytest.raises(ValueError, match=r"autocast: dtype .*; use 'float16' or 'bfloat16'"), mt.autocast(wrong):
            pass
    for other in (np.dtype(dtype), np.dtype(dtype).type):
        with mt.autocast(other):
            assert mt.matmul(x, x).dtype == dtype


def test_regions_of_both_dtypes_nest():
    _, leaf = draws()
    x, w = leaf(2, 4), leaf(4, 4)
    with mt.autocast("bfloat16"):
        outer = mt.linear(x, w)
        with mt.autocast("float16"):
            inner = mt.linear(outer, w)     # 16 bits of the other kind are cast, too
        again = mt.linear(x, w)
    assert outer.dtype == again.dtype == "bfloat16" and inner.dtype == "float16"
    np.testing.assert_array_equal(outer.numpy(), again.numpy())
    mt.sum(inner).backward()
    assert w.grad.dtype == x.grad.dtype == np.float32
