"""Bias and GELU: y = gelu(x + bias), and its gradient. It serves the op gelu, without a bias, and linear_gelu, with
cuBLAS for the products.

With u = x + bias, the exact form and the tanh form:

    y = u·Φ(u)                                  Φ the normal distribution, (1 + erf(u/√2)) / 2
    y = u·σ(2√(2/π)·(u + 0.044715 u³))          σ(z) = 1/(1 + exp(-z)); it is torch's "tanh": (1 + tanh z)/2 = σ(2z)
    ū = ct·(share + u·share′)                   share: what u is multiplied by

Forward moves 8 bytes per float32 element (read x, write y) where separate operations move 8 more for the bias alone and
44 for GELU; nothing but x is kept. Backward moves 12 (read ct and x, write x̄) and adds up the bias's gradient on
the way, as norms.py does.

Source: Hendrycks & Gimpel 2016, "Gaussian error linear units".
"""

import math

import numpy as np
import triton
import triton.language as tl

from ..backend import matmul
from . import Kept, Op, launch
from .column_sums import column_sums, stripes
from .kernel import Kernel

INNER = math.sqrt(2 / math.pi)      # of the tanh form
CUBE = 0.044715
MOST = 2 ** 31 - 2 ** 16            # elements: places are counted in 32 bits, up to the end of the last tile
PROGRAMS = 1056                     # of backward: eight for each of an H200's 132 multiprocessors, which run at once
TWICE_INNER, CUBED = tl.constexpr(2 * INNER), tl.constexpr(CUBE)
ROOT_HALF, DENSITY = tl.constexpr(math.sqrt(0.5)), tl.constexpr(1 / math.sqrt(2 * math.pi))


@triton.jit
def gelu_share(u, TANH: tl.constexpr):
    """What gelu multiplies u by."""
    if TANH:
        return 1.0 / (1.0 + tl.exp(-u * TWICE_INNER * (1.0 + u * u * CUBED)))
    else:
        return 0.5 + 0.5 * tl.erf(u * ROOT_HALF)


@triton.jit
def _gelu_slope(u, TANH: tl.constexpr):
    share = gelu_share(u, TANH)
    if TANH:
        return share + u * TWICE_INNER * (1.0 + u * u * (3.0 * CUBED)) * (share - share * share)
    else:
        return share + u * DENSITY * tl.exp(-0.5 * u * u)


@triton.jit
def _forward(x, bias, y, rows, size, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    across = tl.cdiv(size, COLUMNS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    places = row[:, None] * size + column[None, :]
    u = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        u = u + tl.load(bias + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    tl.store(y + places, (u * gelu_share(u, TANH)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(ct, x, bias, gx, shares, rows, size, stripe, TANH: tl.constexpr, ROWS: tl.constexpr,
              COLUMNS: tl.constexpr, AHEAD: tl.constexpr):
    across = tl.cdiv(size, COLUMNS)
    program = tl.program_id(0) // across
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    b = tl.zeros((COLUMNS,), tl.float32)
    if bias is not None:
        b = tl.load(bias + column, mask=column < size, other=0.0).to(tl.float32)
    share = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(program * stripe, tl.minimum((program + 1) * stripe, tl.cdiv(rows, ROWS)),
                         num_stages=AHEAD):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < size)[None, :]
        places = row[:, None] * size + column[None, :]
        v = tl.load(x + places, mask=inside, other=0.0)
        c = tl.load(ct + places, mask=inside, other=0.0)
        g = c.to(tl.float32) * _gelu_slope(v.to(tl.float32) + b[None, :], TANH)
        tl.store(gx + places, g.to(gx.dtype.element_ty), mask=inside)
        if shares is not None:
            share += g
    if shares is not None:
        tl.store(shares + program * size + column, tl.sum(share, axis=0), mask=column < size)


def definition(x, bias=None, approximate="none"):
    """Forward in NumPy."""
    u = x if bias is None else x + bias
    return u * share_of(u, approximate)


def gradient(ct, x, bias=None, approximate="none"):
    """The cotangents of x and bias in NumPy."""
    u = x if bias is None else x + bias
    share = share_of(u, approximate)
    if approximate == "tanh":
        slope = 2 * INNER * (1 + 3 * CUBE * u * u) * (share - share * share)
    else:
        slope = np.exp(-u * u / 2) / math.sqrt(2 * math.pi)
    g = ct * (share + u * slope)
    return g, None if bias is None else g.reshape(-1, g.shape[-1]).sum(axis=0)


def share_of(u, approximate):
    """What gelu multiplies u by, in NumPy."""
    if approximate == "tanh":
        return (1 + np.tanh(INNER * (u + CUBE * u ** 3))) / 2
    return (1 + np.vectorize(math.erf, otypes=[u.dtype])(u * math.sqrt(0.5))) / 2


_EXAMPLES = ({"*": "fp32"}, {"*": "fp32", "bias": None, "ROWS": 1, "COLUMNS": 1024}, {"*": "bf16", "TANH": True},
             {"*": "fp16", "TANH": True, "bias": None, "ROWS": 1, "COLUMNS": 1024})
FORWARD = Kernel(
    "bias_gelu", _forward, {"x": "*", "bias": "*", "y": "*", "rows": "i32", "size": "i32"},
    {"TANH": False, "ROWS": 4, "COLUMNS": 256}, divisible=("size",), examples=_EXAMPLES)
BACKWARD = Kernel(
    "bias_gelu_backward", _backward,
    {"ct": "*", "x": "*", "bias": "*", "gx": "*", "shares": "*fp32", "rows": "i32", "size": "i32", "stripe": "i32"},
    {"TANH": False, "ROWS": 4, "COLUMNS": 256, "AHEAD": 2}, divisible=("size",),
    examples=tuple(example | ({"shares": None} if "bias" in example else {}) for example in _EXAMPLES))
KERNELS = (FORWARD, BACKWARD)


def _matrix(x, bias):
    """(rows, size, tile): x as a matrix, of one row where there is no bias to say how long rows are."""
    if x.size >= MOST:
        raise ValueError(f"bias_gelu: x {x.shape} has {x.size:,} elements; it must have fewer than 2³¹ - 2¹⁶")
    if bias is None:
        return 1, x.size, {"ROWS": 1, "COLUMNS": 1024}
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"bias_gelu: bias {bias.shape} must have the length of x's last axis {x.shape}")
    return x.size // max(1, bias.size), bias.size, {"ROWS": 4, "COLUMNS": 256}


def bias_gelu(x, bias=None, approximate="none"):
    """gelu(x + bias): x (…, size), bias (size,) or None; approximate as in mt.gelu. Both C-contiguous."""
    rows, size, tile = _matrix(x, bias)
    y = launch.empty(x.shape, x.dtype, x)
    grid = launch.cdiv(rows, tile["ROWS"]) * launch.cdiv(size, tile["COLUMNS"])
    FORWARD((grid,), x, bias, y, rows, size, TANH=approximate == "tanh", **tile)
    return y


def bias_gelu_gradient(ct, x, bias=None, approximate="none", place=None):
    """(x̄, the bias's gradient or None) from a cotangent of x's shape. All C-contiguous. The bias's gradient goes to
    `place` where that is an Into of the engine's."""
    rows, size, tile = _matrix(x, bias)
    across = launch.cdiv(size, tile["COLUMNS"])
    stripe, down = stripes(launch.cdiv(rows, tile["ROWS"]), max(1, PROGRAMS // max(1, across)))
    gx = launch.empty(x.shape, x.dtype, x)
    shares = None if bias is None else launch.empty((down, size), np.float32, x)
    BACKWARD((down * across,), ct, x, bias, gx, shares, rows, size, stripe, TANH=approximate == "tanh", **tile)
    return gx, None if bias is None else column_sums(shares, bias.dtype, (place,))[0]


def gelu(x, approximate):
    """(gelu(x), Kept()): the op's forward; `approximate` is a bool there."""
    return bias_gelu(launch.contiguous(x), None, "tanh" if approximate else "none"), Kept()


def gelu_pullback(ct, wanted, x, approximate):
    """(x̄,)."""
    form = "tanh" if approximate else "none"
    return bias_gelu_gradient(launch.contiguous(ct), launch.contiguous(x), None, form)[:1]


def linear_gelu(x, weight, bias, approximate):
    """(gelu(x Wᵀ + bias), Kept((x Wᵀ,))): x (…, in), weight (out, in), bias (out)."""
    product = matmul(_rows(x), weight.T).reshape(*x.shape[:-1], bias.size)
    return bias_gelu(product, launch.contiguous(bias), "tanh" if approximate else "none"), Kept((product,))


def linear_gelu_pullback(ct, wanted, x, weight, bias, approximate, aux):
    """The cotangents of (x, weight, bias), None where not wanted."""
    product, = aux
    form = "tanh" if approximate else "none"
    g, g_bias = bias_gelu_gradient(launch.contiguous(ct), product, launch.contiguous(bias), form, wanted[2])
    g = _rows(g)
    place = getattr(wanted[1], "array", None)       # where `wanted` is an Into of the engine's
    return (matmul(g, weight).reshape(x.shape) if wanted[0] else None,
            matmul(g.T, _rows(x), out=place) if wanted[1] else None, g_bias if wanted[2] else None)


def _rows(x):
    """As one matrix, so that cuBLAS makes one product of it instead of one per leading index."""
    return x.reshape(-1, x.shape[-1])


def _linear_fits(x, weight, bias, approximate):
    return x.dtype == weight.dtype == bias.dtype and x.size > 0 and 0 < x.size // x.shape[-1] * bias.size < MOST


OPS = {"gelu": Op(gelu, gelu_pullback, lambda x, approximate: x.size < MOST),
       "linear_gelu": Op(linear_gelu, linear_gelu_pullback, _linear_fits)}
