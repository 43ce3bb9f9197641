"""Matrix products."""

import math

from ... import backend, kernels
from ..dispatch import binary, operand
from ..primitive import LinearOp, Primitive, bind, place, state
from .elementwise import mul
from .reduction import sum
from .shape import as_arrays, reshape, swap_last

matmul_by_right = LinearOp("matmul(·, y)", lambda t, y: matmul(t, y), lambda c, y: matmul(c, swap_last(y)))
matmul_by_left = LinearOp("matmul(x, ·)", lambda t, x: matmul(x, t), lambda c, x: matmul(swap_last(x), c))

_matmul = binary("matmul", backend.matmul, (matmul_by_right, "y"), (matmul_by_left, "x"),
                 "x @ y of two axes or more each")


def matmul(x, y):
    """x @ y in every rank that NumPy allows: (…, m, k) @ (…, k, n), leading axes broadcast; a
    vector on the left is a row, on the right a column, and the axis it lent is dropped again."""
    try:
        left, right = len(x.shape), len(y.shape)
    except AttributeError:      # lists, as NumPy takes them
        return matmul(*as_arrays("matmul", (operand("matmul", x, y), operand("matmul", y, x))))
    try:
        if left > 1 and right > 1:
            # One product of all rows instead of many small ones; what is cut over ranks puts its own rows together.
            if left > 2 and right == 2 and x.shape[-1] == y.shape[0] and not hasattr(x, "layout"):
                return reshape(_matmul(reshape(x, _rows(x.shape)), y), (*x.shape[:-1], y.shape[1]))
            return _matmul(x, y)
        if not left or not right:
            raise ValueError(f"matmul: shapes {x.shape} and {y.shape}: 0-d operands have no product; use *")
        out = _matmul(reshape(x, (1, *x.shape)) if left == 1 else x, reshape(y, (*y.shape, 1)) if right == 1 else y)
    except ValueError:
        apart = hasattr(x, "layout") or hasattr(y, "layout")        # which tell more: how they lie
        if left and right and not apart and x.shape[-1] != (rows := y.shape[max(right - 2, 0)]):
            raise ValueError(f"matmul: shapes {x.shape} and {y.shape} don't fit: x has rows of {x.shape[-1]}, and y "
                             f"columns of {rows}") from None
        raise
    shape = out.shape
    if right == 1:
        shape = shape[:-1]
    if left == 1:
        shape = shape[:-1] if right == 1 else (*shape[:-2], shape[-1])
    return reshape(out, shape)


# ---------------------------------------------------------------- y = x Wᵀ + b, fused

def check_linear(name, x, weight, bias=None):
    """ValueError unless the shapes of an op that begins with x Wᵀ + b fit."""
    if len(x.shape) == 0 or x.shape[-1] != weight.shape[-1] or bias is not None and bias.shape != weight.shape[:1]:
        more = "" if bias is None else f" and bias {bias.shape} (out)"
        raise ValueError(f"{name}: x {x.shape}, weight {weight.shape} (out, in){more} don't fit: the last axis of x "
                         f"must be {weight.shape[-1]}")


def linear_forward(x, weight, bias):
    """x Wᵀ + b of raw arrays, the bias added in place where it has the product's dtype."""
    check_linear("linear", x, weight, bias)
    out = backend.matmul(_one_matrix(x), weight.T)
    if bias.dtype == out.dtype:
        out += bias
    else:
        out = out + bias
    return out.reshape(*x.shape[:-1], len(weight))


def sum_of_rows(x, wanted):
    """The cotangent of a bias: Σ over the rows of a raw matrix, in the place that `wanted` may name (see `place`).

    CuPy makes it by one block of threads per 32 columns, each of which waits for a load before it asks for the next:
    768 columns keep 24 multiprocessors busy, with 2 KB each under way. Sums over other axes have no such need.
    """
    if kernels.usable(x) and x.flags.c_contiguous and backend.is_floating(x.dtype) and 0 < x.size < 2 ** 31:
        return kernels.load("column_sums").column_sums(x, places=(wanted,))[0]
    return backend.add_up(x, 0, out=place(wanted, x.dtype))


def linear_pullback(ct, wanted, x, weight):
    """The cotangents of x, weight and bias, None where not wanted; x's wants no x, weight's no weight."""
    flat = _one_matrix(ct)
    return (backend.matmul(flat, weight).reshape(*ct.shape[:-1], weight.shape[1]) if wanted[0] else None,
            backend.matmul(flat.T, _one_matrix(x), out=place(wanted[1], flat.dtype)) if wanted[1] else None,
            sum_of_rows(flat, wanted[2]) if wanted[2] else None)


def _rows(shape):
    return math.prod(shape[:-1]), shape[-1]     # (-1 can't be worked out where the last axis is empty)


def _one_matrix(x):
    return x.reshape(_rows(x.shape))


_linear = Primitive("linear", linear_forward, "x weight bias", reads={"x": "weight", "weight": "x", "bias": ""},
                    definition=lambda x, weight, bias: matmul(x, swap_last(weight)) + bias, pullback=linear_pullback)


def linear(x, weight, bias=None):
    """x Wᵀ + b: x (…, in), weight (out, in), bias (out) or None -> (…, out), as in torch.

    Fused: the bias is added in place, and backward makes the three gradients
    together and none that nobody wants (a first layer's x).
    """
    if bias is not None:
        return bind(_linear, (x, weight, bias))
    check_linear("linear", x, weight)
    if state.autocast is not None:      # the parameter itself is cast once; its transpose is a new array in each call
        weight = state.autocast.lowered(weight)
    return matmul(x, swap_last(weight))


def dot(x, y):
    """Σ x·y of two vectors. ValueError for matrices, which NumPy's dot would multiply, and torch's refuses."""
    shapes = [getattr(each, "shape", ()) for each in (x, y)]
    if max(map(len, shapes)) < 2 and len((product := mul(x, y)).shape) < 2:     # lists have no shape before
        return sum(product)
    raise ValueError(f"dot: shapes {shapes[0]} and {shapes[1]}: it takes vectors; x @ y multiplies matrices, and "
                     "mt.sum(x * y) is the sum over all elements")
