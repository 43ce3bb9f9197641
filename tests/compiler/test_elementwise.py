"""Elementwise ops and reductions where arithmetic is odd: NaN, infinities, signed zeros, mixed dtypes, Python's
numbers, no elements, one element. Arithmetic is NumPy's to the last bit; exp and its like are a C library's, some ulps
away."""

import numpy as np
import pytest

import minitorch_dist as mt

from .compare import EMITS, TRANSCENDENTAL, ULPS, identical, near, run, ulps

EMIT = pytest.mark.parametrize("emit", EMITS)
DTYPES = pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 0.5, 1e-30, -1e30, 3.0, -88.5, 17.0, 1 / 3)
UNARY = ("neg", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "sin", "cos", "tanh", "absolute", "sign",
         "floor", "ceil", "isnan", "isfinite", "sigmoid", "relu", "erf", "logical_not")
BINARY = ("add", "sub", "mul", "div", "power", "mod", "floor_divide", "maximum", "minimum", "greater", "greater_equal",
          "less", "less_equal", "equal", "not_equal", "logical_and", "logical_or", "logical_xor")


def hold(table, args, emit, gradients=True):
    """{name: function}: each gives with the arguments what it gives uncompiled. One compilation for all."""
    def everything(*args):
        return [function(*args) for function in table.values()]
    compiled = mt.compile(everything, emit=emit)
    with np.errstate(all="ignore"):
        found, ours = run(compiled, args) if gradients else (run_plain(compiled, args), [])
        expected, theirs = run(everything, args) if gradients else (run_plain(everything, args), [])
    assert not compiled.breaks and len(found) == len(table)
    for name, a, b in zip(table, found, expected, strict=True):
        compare(name, a, b)
    for a, b in zip(ours, theirs, strict=True):
        near(a, b, "gradients")


def run_plain(function, args):
    return [np.asarray(mt.autodiff.primitive.lower(out)) for out in function(*args)]


def compare(name, found, expected):
    if name.split()[0] in TRANSCENDENTAL and expected.dtype.kind == "f":
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
        assert ulps(found, expected).max(initial=0) <= ULPS, name
    else:
        identical(found, expected, name)


def of_first(name):
    """A unary op as a function of two arguments."""
    function = getattr(mt, name)
    return lambda x, y: function(x)


def times_second(function):
    return lambda x, y: function(x, y) * y


def pairs(dtype):
    """Each special number with each."""
    x, y = np.meshgrid(SPECIAL, SPECIAL, indexing="ij")
    with np.errstate(over="ignore"):
        return x.ravel().astype(dtype), y.ravel().astype(dtype)


@DTYPES
@EMIT
def test_values_of_special_numbers(emit, dtype):
    x, y = pairs(dtype)
    table = {name: of_first(name) for name in UNARY}
    table |= {name: getattr(mt, name) for name in BINARY}
    table |= {"where": lambda x, y: mt.where(mt.greater(x, y), x, y), "clip": lambda x, y: mt.clip(x, -1.0, 2.5),
              "where number": lambda x, y: mt.where(mt.isnan(x), -0.0, y)}
    hold(table, (mt.tensor(x), mt.tensor(y)), emit, gradients=False)
    hold(table, (mt.tensor(x[:, None]), mt.tensor(y[:19])), emit, gradients=False)     # broadcasting


@DTYPES
@EMIT
def test_gradients_at_special_numbers(emit, dtype):
    """Each op has arguments of its own, so that its gradients are its own."""
    x, y = pairs(dtype)

    table = [(name, times_second(of_first(name))) for name in UNARY if name not in ("isnan", "isfinite", "logical_not")]
    table += [(name, getattr(mt, name)) for name in ("add", "sub", "mul", "div", "power", "mod", "maximum", "minimum")]
    table += [("where", lambda x, y: mt.where(mt.greater(x, y), x, y)),
              ("clip", lambda x, y: mt.clip(x, -1.0, 2.5) * y)]
    args = [(x, y) for _ in table]

    def everything(*groups):
        return [f(*group) for (_, f), group in zip(table, groups, strict=True)]
    compiled = mt.compile(everything, emit=emit)
    with np.errstate(all="ignore"):
        (_, found), (_, expected) = run(compiled, args), run(everything, args)
    assert not compiled.breaks
    names = [name for name, _ in table for _ in "xy"]
    for name, a, b in zip(names, found, expected, strict=True):
        assert (a is None) == (b is None), name
        if a is None:       # a constant in pieces
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        bad = ulps(a, b) > 16
        assert not bad.any(), (name, [(*p, u, v) for *p, u, v in zip(x[bad], y[bad], a[bad], b[bad], strict=True)][:5])


@EMIT
def test_reductions_hand_nan_on(emit):
    """max, min and sum over rows, columns and everything, where NaN stands first, last, in the middle, or alone."""
    x = np.random.default_rng(0).standard_normal((5, 9))
    for i, j in ((0, 0), (1, 8), (2, 4)):
        x[i, j] = np.nan
    x[3], x[4, 2] = -np.inf, np.inf
    table = {f"{f} {axis}": lambda x, f=f, axis=axis: getattr(mt, f)(x, axis) for f in ("max", "min", "sum", "mean")
             for axis in (0, 1, None)}
    table |= {f"{f} and on": lambda x, f=f: mt.square(x * 2.0 - getattr(mt, f)(x, 1, keepdims=True))
              for f in ("max", "min", "sum")}
    for dtype in (np.float64, np.float32):
        def everything(x):
            return [f(x) for f in table.values()]
        compiled = mt.compile(everything, emit=emit)
        with np.errstate(all="ignore"):
            for name, a, b in zip(table, run_plain(compiled, [mt.tensor(x.astype(dtype))]),
                                  run_plain(everything, [mt.tensor(x.astype(dtype))]), strict=True):
                (identical if name[:3] in ("max", "min") else near)(a, b, name)
        assert not compiled.breaks


KINDS = ("float64", "float32", "float16", "int64", "int32", "int8", "uint8", "uint64", "bool")


@EMIT
def test_mixed_dtypes(emit):
    """Each dtype with each, and with Python's numbers: results have NumPy's dtype and NumPy's bits."""
    names = ("add", "sub", "mul", "div", "maximum", "minimum", "greater", "less_equal", "equal", "not_equal",
             "logical_and", "logical_xor", "mod", "floor_divide", "power")
    data = np.array([3, 1, 2, 7, 0, 1, 5])
    xs = {kind: mt.tensor(data.astype(kind)) for kind in KINDS}
    ys = {kind: mt.tensor((data[::-1] % 3 + 1).astype(kind)) for kind in KINDS}
    numbers = (2, 3.5, True, -1, np.float32(1.5), np.int64(2), np.float64(0.1))
    table = {}
    for name in names:
        f = getattr(mt, name)
        for a in KINDS:
            table |= {f"{name} {a} {b}": (f, xs[a], ys[b]) for b in KINDS}
            table |= {f"{name} {a} {n!r}": (f, xs[a], n) for n in numbers} | {
                f"{name} {n!r} {a}": (f, n, ys[a]) for n in numbers}
    for a in KINDS:
        table |= {f"{name} {a}": (getattr(mt, name), xs[a]) for name in UNARY if name != "rsqrt"}
        table |= {f"astype {a} {b}": (mt.astype, xs[a], np.dtype(b)) for b in KINDS}
        table |= {f"where {a} {b}": (mt.where, xs["bool"], xs[a], ys[b]) for b in KINDS}
        table |= {f"sum {a}": (mt.sum, xs[a]), f"max {a}": (mt.max, xs[a])}

    def possible(f, args):
        with np.errstate(all="ignore"):
            try:
                return [f(*args)]
            except (TypeError, OverflowError, ValueError):      # eager refuses: int8 + 300, -True, …
                return []
    expected = {label: run_plain(lambda *_, made=made: made, ())[0] for label, (f, *args) in table.items()
                if (made := possible(f, args))}
    assert len(expected) > 0.9 * len(table)
    labels = list(expected)

    def everything(xs, ys):
        def new(v):
            for old, given in ((KEPT[0], xs), (KEPT[1], ys)):
                for kind, tensor in old.items():
                    if v is tensor:
                        return given[kind]
            return v
        return [table[label][0](*map(new, table[label][1:])) for label in labels]
    KEPT = (xs, ys)
    compiled = mt.compile(everything, emit=emit)
    copies = [{kind: mt.tensor(t) for kind, t in table.items()} for table in KEPT]
    with np.errstate(all="ignore"):
        made = compiled(*copies)
    assert not compiled.breaks
    wrong = []
    for label, found in zip(labels, run_plain(lambda *_: made, ()), strict=True):
        try:
            compare(label, found, expected[label])
        except AssertionError as error:
            wrong.append((label, found, expected[label], str(error)[:60]))
    assert not wrong, (len(wrong), wrong[:8])


@EMIT
def test_products_of_mixed_dtypes(emit):
    """Each dtype with each, of 16 bits too, and what is computed of the product: right, and of NumPy's dtype."""
    kinds, data = (*KINDS, "int16", mt.bfloat16), np.array([[3, 1], [2, 7], [0, 1]])
    for a in kinds:
        xs, ys = mt.tensor(data, a), [mt.tensor(data[:2] % 3 - (kind in ("int8", "int16")), kind) for kind in kinds]

        def everything(x, ys):
            return [y + y for y in [mt.matmul(x, y) for y in ys]]
        compiled = mt.compile(everything, emit=emit)
        found, expected = run_plain(compiled, (xs, ys)), run_plain(everything, (xs, ys))
        assert not compiled.breaks
        for one, other, y in zip(found, expected, ys, strict=True):
            dtype = mt.backend.result_type(xs.dtype, y.dtype)
            exact = 2 * np.float64(xs.numpy()) @ np.float64(y.numpy())
            assert one.dtype == other.dtype == dtype, (a, y.dtype)
            for made in (one, other):
                np.testing.assert_array_equal(np.float64(made), exact > 0 if dtype.kind == "b" else exact)


@EMIT
@pytest.mark.parametrize("shape", [(), (1,), (0,), (1, 1), (1, 7), (7, 1), (3, 0), (0, 3), (2, 1, 5), (13, 11)],
                         ids=str)
def test_extents(emit, shape):
    """0-d, one element, none; with broadcasting, where that fits. A chain with a reduction, and its gradients."""
    def f(x, row, number):
        h = mt.relu(x * row + number) - mt.exp(-mt.absolute(x)) * 0.5
        outs = [h, mt.sum(h), mt.reshape(h, -1), mt.transpose(h) + 1.0, mt.broadcast_to(h, (2, *h.shape)) * 3.0]
        outs += [mt.sum(h, -1, keepdims=True), mt.sum(h, 0)] if x.ndim else []
        outs += [mt.softmax(h)] if x.ndim and x.shape[-1] else []
        return outs + ([mt.mean(h * h), mt.max(h) - h] if x.size else [])
    random = np.random.default_rng(0)
    args = [random.standard_normal(shape), random.standard_normal(shape[-1:]), random.standard_normal(())]
    compiled = mt.compile(f, emit=emit)
    for _ in range(2):
        (found, ours), (expected, theirs) = run(compiled, args), run(f, args)
        for a, b in zip((*found, *ours), (*expected, *theirs), strict=True):
            near(a, b)
    assert not compiled.breaks
