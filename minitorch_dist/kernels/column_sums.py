"""Sums of a matrix's columns: out[c] = Σ_r x[r, c], always in the same order.

The second stage of gradients of weights and biases (layer norm, RMS norm, bias + GELU): there each program adds up its
own rows, and what the programs found is a matrix of a few hundred rows, which this kernel adds up. Atomic additions
would save the second stage, and give other bits on every run.

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


@triton.jit
def _column_sums(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + column, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=column < columns)


def definition(x):
    """The same in NumPy."""
    return x.sum(axis=0)


COLUMN_SUMS = Kernel(
    "column_sums", _column_sums, {"x": "*", "out": "*", "rows": "i32", "columns": "i32"}, {"ROWS": 64, "COLUMNS": 32},
    divisible=("columns",), examples=({"*": "fp32"}, {"x": "fp32", "out": "bf16"}, {"x": "fp16", "out": "fp16"}))
KERNELS = (COLUMN_SUMS,)


def column_sums(x, dtype=None):
    """Sums over the rows of x (rows, columns), of fewer than 2³¹ elements: (columns,) of a dtype, x's by default."""
    if x.ndim != 2 or x.size >= 2 ** 31:
        raise ValueError(f"column_sums: x {x.shape} must be (rows, columns), of fewer than 2³¹ elements")
    out = launch.empty(x.shape[1:], np.dtype(dtype or x.dtype), x)
    COLUMN_SUMS((triton.cdiv(x.shape[1], COLUMN_SUMS.constexprs["COLUMNS"]),), x, out, *x.shape)
    return out
