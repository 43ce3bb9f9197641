"""Layer norm and RMS norm of rows, forward and backward.

With x̂ = (x - mean)·r and r = 1/√(var + eps), or x̂ = x·r and r = 1/√(mean(x²) + eps) for RMS norm:

    y = x̂ · weight + bias
    x̄ = r·(g - mean(g) - x̂·mean(g·x̂))      g = ct · weight; RMS norm has no mean(g)
    weight's = Σ ct·x̂,  bias's = Σ ct        over the rows

A program has whole rows in registers, so that mean, variance and result come from one read: 8 bytes per float32 element
in forward (read x, write y), where separate operations move 48; mean and r are kept, 8 bytes per row, instead of
x̂. Backward reads ct and x, writes x̄, 12 bytes per element, and works on a stripe of rows, the next of which are under
way while it computes. Its shares of the weight's and the bias's gradient stay in registers until the stripe is through:
a matrix of one row per program, a few hundred, which column_sums.py adds up. No atomics: the same bits on every run.

Sources: Ba et al. 2016, "Layer normalization"; Zhang & Sennrich 2019, "Root mean square layer normalization".
"""

import math

import numpy as np
import triton
import triton.language as tl

from . import Kept, Op, launch
from .column_sums import column_sums, stripes
from .kernel import Kernel

WIDEST = 8192       # elements of a row: more don't fit into a program's registers
# By padded row: warps, and how many tiles backward's loop loads at once; others have 4 and 3. So backward keeps all in
# registers on sm_90. Where rows are no multiples of 16, each element has a load, an address and a mask of its own (and
# beyond 4,096 some 100 bytes of a thread's registers are kept in memory all the same).
TILES = {2048: (8, 3), 4096: (16, 3), 8192: (8, 2)}
ODD = {2048: (8, 2), 4096: (16, 1), 8192: (32, 1)}
PROGRAMS = 528      # of backward: four for each of an H200's 132 multiprocessors; half as many where rows are long


@triton.jit
def _forward(x, weight, bias, y, mean, scale, rows, size, eps,
             LAYER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    places = row.to(tl.int64)[:, None] * size + column[None, :]
    v = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        m = tl.sum(v, axis=1) / size.to(tl.float32)
        v = tl.where(inside, v - m[:, None], 0.0)
        tl.store(mean + row, m, mask=row < rows)
    r = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(v * v, axis=1) / size.to(tl.float32) + eps))
    tl.store(scale + row, r, mask=row < rows)
    v = v * r[:, None]
    if weight is not None:
        v = v * tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        v = v + tl.load(bias + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    tl.store(y + places, v.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(ct, x, weight, mean, scale, gx, shares, rows, size, stripe, LAYER: tl.constexpr, WEIGHT: tl.constexpr,
              BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    w = tl.full((BLOCK,), 1.0, tl.float32)
    if weight is not None:
        w = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    weight_share = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_share = tl.zeros((ROWS, BLOCK), tl.float32)
    end = tl.minimum((program + 1) * stripe, tl.cdiv(rows, ROWS))
    for tile in tl.range(program * stripe, end, num_stages=AHEAD):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < size)[None, :]
        places = row.to(tl.int64)[:, None] * size + column[None, :]
        r = tl.load(scale + row, mask=row < rows, other=0.0)
        c = tl.load(ct + places, mask=inside, other=0.0).to(tl.float32)
        normal = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        if LAYER:
            m = tl.load(mean + row, mask=row < rows, other=0.0)
            normal = tl.where(inside, normal - m[:, None], 0.0)
        normal = normal * r[:, None]
        if WEIGHT:
            weight_share += c * normal
        if BIAS:
            bias_share += c
        if gx is not None:
            g = c * w[None, :]
            out = g - normal * (tl.sum(g * normal, axis=1) / size.to(tl.float32))[:, None]
            if LAYER:
                out = out - (tl.sum(g, axis=1) / size.to(tl.float32))[:, None]
            tl.store(gx + places, (out * r[:, None]).to(gx.dtype.element_ty), mask=inside)
    both: tl.constexpr = 2 if WEIGHT and BIAS else 1
    mine = program.to(tl.int64) * size * both + column
    if WEIGHT:
        tl.store(shares + mine, tl.sum(weight_share, axis=0), mask=column < size)
    if BIAS:
        tl.store(shares + mine + size * (both - 1), tl.sum(bias_share, axis=0), mask=column < size)


def definition(x, weight, bias, n, eps, layer=True):
    """Forward in NumPy, over the last n axes; layer=False is RMS norm."""
    axes = tuple(range(-n, 0))
    centred = x - x.mean(axis=axes, keepdims=True) if layer else x
    y = centred / np.sqrt((centred * centred).mean(axis=axes, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def gradient(ct, x, weight, n, eps, layer=True):
    """The cotangents of x, weight and bias in NumPy."""
    axes, lead = tuple(range(-n, 0)), tuple(range(x.ndim - n))
    centred = x - x.mean(axis=axes, keepdims=True) if layer else x
    r = 1 / np.sqrt((centred * centred).mean(axis=axes, keepdims=True) + eps)
    normal, g = centred * r, ct if weight is None else ct * weight
    gx = g - normal * (g * normal).mean(axis=axes, keepdims=True)
    gx = gx - g.mean(axis=axes, keepdims=True) if layer else gx
    return gx * r, (ct * normal).sum(axis=lead), ct.sum(axis=lead)


_EXAMPLES = ({"*": "fp32", "BLOCK": 1024}, {"*": "fp32", "LAYER": False, "mean": None, "bias": None},
             {"*": "bf16", "BLOCK": 4096, "num_warps": 16},
             {"*": "fp16", "weight": None, "bias": None, "ROWS": 8, "BLOCK": 64},
             {"*": "fp32", "BLOCK": 8192, "num_warps": 8}, {"*": "fp32", "BLOCK": 4096, "num_warps": 16})
FORWARD = Kernel(
    "norm", _forward, {"x": "*", "weight": "*", "bias": "*", "y": "*", "mean": "*fp32", "scale": "*fp32", "rows": "i32",
                       "size": "i32", "eps": "fp32"},
    {"LAYER": True, "ROWS": 1, "BLOCK": 1024}, divisible=("size",), examples=_EXAMPLES)
BACKWARD = Kernel(
    "norm_backward", _backward,
    {"ct": "*", "x": "*", "weight": "*", "mean": "*fp32", "scale": "*fp32", "gx": "*", "shares": "*fp32",
     "rows": "i32", "size": "i32", "stripe": "i32"},
    {"LAYER": True, "WEIGHT": True, "BIAS": True, "ROWS": 1, "BLOCK": 1024, "AHEAD": 3}, divisible=("size",),
    examples=tuple({key: value for key, value in example.items() if key != "bias"} | {
        "BIAS": "bias" not in example, "AHEAD": TILES.get(example.get("BLOCK"), (4, 3))[1]} for example in _EXAMPLES))
KERNELS = (FORWARD, BACKWARD)


def _tile(size):
    """(the options for rows of `size` elements, backward's AHEAD): short rows share a program, long ones get more
    warps."""
    block = max(16, launch.next_power_of_2(size))
    warps, ahead = (ODD if size % 16 else TILES).get(block, (4, 3))
    return {"ROWS": max(1, 1024 // block), "BLOCK": block, "num_warps": warps}, ahead


def _norm(x, weight, bias, n, eps, layer):
    x = launch.contiguous(x)
    size = math.prod(x.shape[-n:])
    rows, (tile, _) = x.size // size, _tile(size)
    y = launch.empty(x.shape, x.dtype, x)
    mean = launch.empty((rows,), np.float32, x) if layer else None
    scale = launch.empty((rows,), np.float32, x)
    weight, bias = (None if w is None else launch.contiguous(w) for w in (weight, bias))
    FORWARD((launch.cdiv(rows, tile["ROWS"]),), x, weight, bias, y, mean, scale, rows, size, eps, LAYER=layer, **tile)
    return y, Kept((mean, scale))


def _pull(ct, x, weight, n, aux, wanted, layer):
    """Cotangents of x, weight and bias, None where not wanted."""
    ct, x, (mean, scale) = launch.contiguous(ct), launch.contiguous(x), aux
    shape = x.shape[-n:]
    size = math.prod(shape)
    rows, (tile, ahead) = x.size // size, _tile(size)
    stripe, programs = stripes(launch.cdiv(rows, tile["ROWS"]), PROGRAMS // 2 if tile["BLOCK"] > 2048 else PROGRAMS)
    gx = launch.empty(x.shape, x.dtype, x) if wanted[0] else None
    _, for_weight, for_bias = map(bool, wanted)
    shares = launch.empty((programs, size * (for_weight + for_bias)), np.float32, x) if any(wanted[1:]) else None
    BACKWARD((programs,), ct, x, None if weight is None else launch.contiguous(weight), mean, scale, gx, shares, rows,
             size, stripe, LAYER=layer, WEIGHT=for_weight, BIAS=for_bias, AHEAD=ahead, **tile)
    sums = iter(column_sums(shares, x.dtype, [w for w in wanted[1:] if w]) if any(wanted[1:]) else ())
    sums = [next(sums) if w else None for w in wanted[1:]]
    return gx, *(s if s is None or s.shape == shape else s.reshape(shape) for s in sums)    # an Into's own array stays


def layer_norm(x, weight, bias, n, eps):
    """(y, Kept((mean, r))) over the last n axes of x, of at most WIDEST elements; weight and bias of their shape, or
    None.

    y has x's dtype; mean and r are float32, one per row.
    """
    return _norm(x, weight, bias, n, eps, True)


def layer_norm_pullback(ct, wanted, x, weight, n, aux):
    """The cotangents of (x, weight, bias), None where not wanted."""
    return _pull(ct, x, weight, n, aux, wanted, True)


def rms_norm(x, weight, n, eps):
    """(y, Kept((None, r))): as layer_norm, without mean and bias."""
    return _norm(x, weight, None, n, eps, False)


def rms_norm_pullback(ct, wanted, x, weight, n, aux):
    """The cotangents of (x, weight), None where not wanted."""
    return _pull(ct, x, weight, n, aux, (*wanted, False), False)[:2]


def _fits(x, *others):
    *weights, n, _ = others
    return (x.size > 0 and math.prod(x.shape[-n:]) <= WIDEST and x.size // math.prod(x.shape[-n:]) < 2 ** 31 - 2 ** 16
            and all(w is None or w.dtype == x.dtype for w in weights))


OPS = {"layer_norm": Op(layer_norm, layer_norm_pullback, _fits), "rms_norm": Op(rms_norm, rms_norm_pullback, _fits)}
