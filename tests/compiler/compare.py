"""What the tests of the compiler share: a function's values and gradients, compiled and not, against each other."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist.autodiff.primitive import lower
from minitorch_dist.autodiff.tree import flatten
from minitorch_dist.backend import is_array, to

EMITS = ("c", "numpy")
# Their values are a C library's, not NumPy's: what they may differ by, in units in the last place.
TRANSCENDENTAL = {"exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf", "power", "sigmoid"}
ULPS = 6


def arrays(tree):
    """The arrays in nested results, as NumPy's."""
    return [np.asarray(to(lower(leaf), "cpu")) for leaf in flatten(tree, order=list)[0]]


def tensors(args, device="cpu"):
    """Tensors of the floating arrays among nested arguments, that gradients reach, on the host in the same memory; the
    rest as it is, on the device."""
    leaves, rebuild = flatten(args, order=list)
    leaves = [to(a, device) if isinstance(a, np.ndarray) else a for a in leaves]
    return rebuild([mt.Tensor(a).requires_grad_() if is_array(a) and a.dtype.kind == "f" else a for a in leaves])


def run(function, args, seed=0, device="cpu"):
    """(results, gradients of all floating arguments for random cotangents), as lists of NumPy arrays."""
    args = tensors(args, device)
    outs = flatten(function(*args), order=list)[0]
    random = np.random.default_rng(seed)
    total = None
    for out in outs:
        ct = random.standard_normal(getattr(lower(out), "shape", ()))
        if isinstance(out, mt.Tensor) and out.requires_grad:
            term = mt.sum(out * to(np.asarray(ct, out.dtype), device)).astype(np.float64)
            total = term if total is None else total + term
    if total is not None:
        total.backward()
    leaves = [x for x in flatten(args, order=list)[0] if isinstance(x, mt.Tensor)]
    return arrays(outs), [None if x.grad is None else x.grad.cpu().numpy() for x in leaves]


def ulps(a, b):
    """How far two arrays of one floating dtype are apart, in units in the last place of the numbers around them; NaN
    and the infinities are as far from everything but themselves as can be."""
    a, b = np.asarray(a), np.asarray(b)
    with np.errstate(all="ignore"):
        distance = np.abs(a - b) / np.spacing(np.maximum(np.maximum(np.abs(a), np.abs(b)), np.finfo(a.dtype).tiny))
        return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.where(np.isnan(distance), np.inf, distance))


def identical(found, expected, what=""):
    """Shape, dtype and bits; any NaN is as good as another."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    np.testing.assert_array_equal(found, expected, err_msg=what)
    if found.dtype.kind == "f":
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(expected)[numbers],
                                      err_msg=f"{what}: the sign of a zero")


def near(found, expected, what="", rounding=64):
    """Shape, dtype, and numbers within some roundings, of the greatest where they are sums."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    if found.dtype.kind != "f":
        np.testing.assert_array_equal(found, expected, err_msg=what)
        return
    finite = np.abs(expected[np.isfinite(expected)])
    scale = max(1.0, finite.max(initial=0))
    np.testing.assert_allclose(found, expected, rtol=0, atol=rounding * scale * np.finfo(found.dtype).eps, err_msg=what)


def same(found, expected, compare=near, what=""):
    """Two results of run."""
    for kind, ours, theirs in zip(("value", "gradient"), found, expected, strict=True):
        assert len(ours) == len(theirs)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            label = f"{what}: {kind} {i}"
            assert (a is None) == (b is None), label
            if a is not None:
                compare(a, b, label)


def check(function, *args, emit="c", compare=near, calls=2, **options):
    """A function compiled gives what it gives: values, and gradients of all arguments; and once more from its graph."""
    compiled = mt.compile(function, emit=emit, **options)
    for seed in range(calls):
        with np.errstate(all="ignore"):
            same(run(compiled, args, seed), run(function, args, seed), compare, getattr(function, "__name__", ""))
    assert not compiled.breaks
    return compiled
