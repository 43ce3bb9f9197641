"""What the tests of autocast share: numbers of their own for each test, and how far apart two results are."""

import numpy as np
import pytest

import minitorch_dist as mt

mt.backend.load_bfloat16()         # from here on NumPy knows the name
EPS = {"float16": 2.0 ** -10, "bfloat16": 2.0 ** -7}
each_dtype = pytest.mark.parametrize("dtype", EPS)
IMAGE, KERNEL, HEADS = (2, 3, 5, 6), (4, 3, 2, 3), (2, 2, 4, 5)


def draws(seed=11):
    """(randn, leaf), which draw from a generator of their own: randn(*shape, dtype=) gives an array, leaf(*shape) a
    float32 tensor that wants a gradient."""
    rng = np.random.default_rng(seed)

    def randn(*shape, dtype="float32"):
        return rng.standard_normal(shape).astype(mt.backend.as_dtype(dtype))

    def leaf(*shape):
        return mt.tensor(randn(*shape), requires_grad=True)
    return randn, leaf


def rounded(a, dtype):
    """To 16 bits and back to float32."""
    return np.asarray(a).astype(mt.backend.as_dtype(dtype)).astype(np.float32)


def distance(a, b):
    """‖a - b‖ / ‖b‖"""
    return np.linalg.norm(np.float64(a) - np.float64(b)) / np.linalg.norm(np.float64(b))


def passes(model, x, dtype, inside=False):
    """The gradients of a model's loss under autocast; backward outside of it, or inside."""
    labels = x if x.dtype.kind == "i" else np.arange(6)
    model.zero_grad()
    with mt.autocast(dtype):
        loss = mt.nn.cross_entropy(model(x), labels)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [p.grad.numpy().copy() for p in model.parameters()]
