"""Every entry of the op table that a graph can hold, compiled in C and in tiles: values and gradients are eager's."""

from contextlib import nullcontext

import numpy as np
import pytest

import minitorch_dist as mt
from tests.autodiff.samples import CONSTANT, SAMPLES, entries

from .compare import EMITS, near, run

DTYPES = pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
# How many elements a mask selects depends on values: test_breaks.py.
BREAK = {"getitem-mask"}
EMIT = pytest.mark.parametrize("emit", EMITS)


def hold(groups, emit, dtype, device="cpu", around=nullcontext):
    """[(label, function, arguments)], all compiled as one function: that is one compilation for all of them. On a GPU
    what is compiled there, inside of a context of `around`, is compared with what the host gives."""
    args = [tuple(a.astype(dtype) if a.dtype.kind == "f" else a for a in group) for _, _, group in groups]

    def everything(*args):
        return [function(*group) for (_, function, _), group in zip(groups, args, strict=True)]
    compiled = mt.compile(everything, emit=emit)
    with np.errstate(all="ignore"):
        with around():
            values, gradients = run(compiled, args, device=device)
        expected_values, expected_gradients = run(everything, args)
    assert not compiled.breaks
    labels = [label for label, _, _ in groups]
    assert len(values) == len(labels)
    for label, found, expected in zip(labels, values, expected_values, strict=True):
        near(found, expected, label)
    owners = [label for label, _, group in groups for a in group if a.dtype.kind == "f"]
    for label, found, expected in zip(owners, gradients, expected_gradients, strict=True):
        assert (found is None) == (expected is None), label
        if found is not None:
            near(found, expected, f"gradient of {label}", rounding=256)


def constants():
    """Samples of the ops without a derivative."""
    x = np.random.default_rng(0).integers(-3, 4, (5, 7)) * 0.5
    y = np.random.default_rng(1).integers(-3, 4, 7) * 0.5 + 0.25 * (np.arange(7) % 2)
    for name in sorted(CONSTANT):
        two = len(mt.OPS[name].inputs) == 2
        yield name, CONSTANT[name], (x, y) if two else (x,)


def test_every_entry_is_held():
    assert entries() <= {s.covers for s in SAMPLES} | {name for name, _, _ in constants()}


@DTYPES
@EMIT
def test_samples(emit, dtype):
    hold([(s.id, s.function, s.args) for s in SAMPLES if s.id not in BREAK], emit, dtype)


@DTYPES
@EMIT
def test_ops_without_a_derivative(emit, dtype):
    hold(list(constants()), emit, dtype)


def spread_out(a):
    """The same values, reversed and with gaps."""
    wide = np.full(tuple(2 * e for e in a.shape), np.nan if a.dtype.kind == "f" else 0, a.dtype)
    view = wide[tuple(slice(None, None, -2) for _ in a.shape)]
    view[...] = a
    return view


@EMIT
def test_arguments_of_any_memory_layout(emit):
    """Arrays as they come, reversed and with gaps; in a second call from one graph."""
    chosen = [s for s in SAMPLES if s.covers in ("add", "div", "matmul", "sum", "gelu", "softmax", "layer_norm", "max",
                                                 "where", "relu", "transpose", "concatenate")]
    plain = [s.args for s in chosen]
    odd = [tuple(spread_out(a) if a.ndim else a for a in args) for args in plain]
    fortran = [tuple(np.asarray(a, order="F") for a in args) for args in plain]

    def everything(*groups):
        return [s.function(*group) for s, group in zip(chosen, groups, strict=True)]
    compiled = mt.compile(everything, emit=emit)
    expected = run(everything, plain)
    for args in (fortran, plain, odd):
        assert not any(a.flags.c_contiguous for group in odd for a in group if a.size > 1)
        for ours, theirs in zip(run(compiled, args), expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                near(a, b)
    assert not compiled.breaks
