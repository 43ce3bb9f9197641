"""Sums of a matrix's columns: out[c] = Σ_r x[r, c], always in the same order.

The second stage of gradients of weights and biases (layer norm, RMS norm, bias + GELU): there each program adds up its
own rows, and what the programs found is a matrix of a few hundred rows, which this kernel adds up. Where they found
several things, as a weight's and a bias's gradient, those stand side by side: one launch makes up to four. Atomic
additions would save the second stage, and give other bits on every run. It also adds up a linear layer's cotangents,
for the gradient of its bias (ops/linalg.py). It reads each element once, 4 bytes in float32.

    program      0               1               2
    x        |  |  |  |  |   |  |  |  |  |   |  |  |  X  X      X: masked
             +  +  +  +  +   +  +  +  +  +   +  +  +
    out      =  =  =  =  =   =  =  =  =  =   =  =  =
"""

import numpy as np
import triton
import triton.language as tl

from . import launch
from .kernel import Kernel

MOST = 4        # arrays that one launch makes


@triton.jit
def _part(out, column, split, sums):
    tl.store(out + column, sums.to(out.dtype.element_ty), mask=(column >= 0) & (column < split))


@triton.jit
def _column_sums(x, out, second, third, fourth, rows, columns, split, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((ROWS, COLUMNS), wide)
    for first in tl.range(0, rows, ROWS, num_stages=2):      # so the loads of a tile are under way together
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(wide)
    sums = tl.sum(total, axis=0)
    tl.store(out + column, sums.to(out.dtype.element_ty), mask=column < split)
    if second is not None:
        _part(second, column - split, split, sums)
    if third is not None:
        _part(third, column - 2 * split, split, sums)
    if fourth is not None:
        _part(fourth, column - 3 * split, split, sums)


def definition(x):
    """The same in NumPy."""
    return x.sum(axis=0)


_TWO = {"third": None, "fourth": None}
_ONE = {"second": None, **_TWO}
COLUMN_SUMS = Kernel(
    "column_sums", _column_sums,
    {"x": "*", "out": "*", "second": "*", "third": "*", "fourth": "*", "rows": "i32", "columns": "i32",
     "split": "i32"},
    {"ROWS": 256, "COLUMNS": 8}, divisible=("columns", "split"), num_warps=8,
    examples=({"*": "fp32", **_ONE}, {"x": "fp32", "out": "bf16", "second": "bf16", **_TWO, "COLUMNS": 32},
              {"*": "fp32", **_TWO, "ROWS": 512, "COLUMNS": 16}, {"*": "fp16", **_ONE, "ROWS": 64},
              {"*": "fp32"}, {"*": "fp64", **_ONE, "ROWS": 512}))
KERNELS = (COLUMN_SUMS,)


def stripes(tiles, programs):
    """(stripe, programs): how many of a matrix's tiles of rows each program of a first stage takes, one after the
    other, where there shall be at most so many, and how many that makes."""
    stripe = max(1, launch.cdiv(tiles, programs))
    return stripe, launch.cdiv(tiles, stripe)


def _tile(rows, columns):
    """All rows at once, if there is room; narrow tiles where few columns would make few programs."""
    wide = 32 if columns >= 4096 else 16 if columns >= 2048 else 8
    return {"ROWS": min(max(launch.next_power_of_2(rows), 64), 8192 // wide), "COLUMNS": wide}


def column_sums(x, dtype=None, places=(None,)):
    """Sums over the rows of x (rows, columns), of fewer than 2³¹ elements: a list of arrays of a dtype, x's by default,
    which share the columns evenly, one for each of `places`, of which there are one to four.

    A place that is an Into of the engine's is that array itself, of any shape; the others are vectors.
    """
    if x.ndim != 2 or x.size >= 2 ** 31 or not 1 <= len(places) <= MOST or x.shape[1] % len(places):
        raise ValueError(f"column_sums: x {x.shape} must be (rows, columns), of fewer than 2³¹ elements, for 1 to "
                         f"{MOST} places that share the columns evenly; there are {len(places)}")
    split, dtype = x.shape[1] // len(places), np.dtype(dtype or x.dtype)
    outs = [_place(getattr(place, "array", None), split, dtype, x) for place in places]
    tile = _tile(*x.shape)
    COLUMN_SUMS((launch.cdiv(x.shape[1], tile["COLUMNS"]),), x, *outs, *[None] * (MOST - len(outs)), *x.shape, split,
                **tile)
    return outs


def _place(array, size, dtype, like):
    """The array itself where the sums can go there, or a new vector."""
    fits = array is not None and array.dtype == dtype and array.size == size and array.flags.c_contiguous
    return array if fits else launch.empty((size,), dtype, like)
