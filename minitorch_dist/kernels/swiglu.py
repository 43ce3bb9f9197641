"""SwiGLU: y = silu(gate)·up, and its gradient. It serves the op swiglu.

With σ = 1/(1 + exp(-gate)):

    y = gate·σ·up
    ū = ct·gate·σ
    ḡ = ct·up·σ·(1 + gate·(1 - σ))

Gate and up may be the two halves of rows of one matrix: they are read where they lie. Forward moves 12 bytes per
float32 element (read both, write y), backward 20 (read ct and both, write both cotangents): one launch each. Nothing
but gate and up is kept.

Source: Shazeer 2020, "GLU variants improve transformer".
"""

import numpy as np
import triton
import triton.language as tl

from . import Op, launch
from .kernel import Kernel

MOST = 2 ** 30      # elements: places are counted in 32 bits, in rows at most twice as far apart as they are long
TILE = {"ROWS": 4, "COLUMNS": 256}


@triton.jit
def _forward(gate, up, y, rows, size, gate_stride, up_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    across = tl.cdiv(size, COLUMNS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < size)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * size + column, (g / (1.0 + tl.exp(-g)) * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(ct, gate, up, g_gate, g_up, rows, size, gate_stride, up_stride, ROWS: tl.constexpr,
              COLUMNS: tl.constexpr):
    across = tl.cdiv(size, COLUMNS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < size)
    c = tl.load(ct + row * size + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-g))
    if g_up is not None:
        tl.store(g_up + row * size + column, (c * g * share).to(g_up.dtype.element_ty), mask=inside)
    if g_gate is not None:
        u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        slope = share * (1.0 + g * (1.0 - share))
        tl.store(g_gate + row * size + column, (c * u * slope).to(g_gate.dtype.element_ty), mask=inside)


def definition(gate, up):
    """Forward in NumPy."""
    return gate / (1 + np.exp(-gate)) * up


def gradient(ct, gate, up):
    """The cotangents of gate and up in NumPy."""
    share = 1 / (1 + np.exp(-gate))
    return ct * up * share * (1 + gate * (1 - share)), ct * gate * share


_NUMBERS = {"rows": "i32", "size": "i32", "gate_stride": "i32", "up_stride": "i32"}
_STEPS = ("size", "gate_stride", "up_stride")
FORWARD = Kernel("swiglu", _forward, {"gate": "*", "up": "*", "y": "*", **_NUMBERS}, TILE, divisible=_STEPS,
                 strided=("gate", "up"), examples=({"*": "fp32"}, {"*": "bf16"}, {"*": "fp16"}))
BACKWARD = Kernel(
    "swiglu_backward", _backward, {"ct": "*", "gate": "*", "up": "*", "g_gate": "*", "g_up": "*", **_NUMBERS}, TILE,
    divisible=_STEPS, strided=("gate", "up"), examples=({"*": "fp32"}, {"*": "bf16"}, {"*": "fp16", "g_up": None}))
KERNELS = (FORWARD, BACKWARD)


def _matrix(x):
    """x as rows of neighbouring elements, copied only where they aren't."""
    rows = x.reshape(-1, x.shape[-1])
    plain = rows.strides[1] == rows.itemsize and 0 <= rows.strides[0] <= 2 * rows.itemsize * rows.shape[1]
    return rows if plain else rows.copy()


def _start(kernel, gate, up, arrays):
    """Start a kernel on arrays(gate, up), these two as matrices."""
    gate, up = _matrix(gate), _matrix(up)
    rows, size = gate.shape
    grid = launch.cdiv(rows, TILE["ROWS"]) * launch.cdiv(size, TILE["COLUMNS"])
    strides = (x.strides[0] // x.itemsize for x in (gate, up))
    kernel((grid,), *arrays(gate, up), rows, size, *strides, **TILE)


def swiglu(gate, up):
    """silu(gate) · up of two arrays of one shape and dtype."""
    y = launch.empty(gate.shape, gate.dtype, gate)
    _start(FORWARD, gate, up, lambda gate, up: (gate, up, y))
    return y


def swiglu_gradient(ct, gate, up, wanted=(True, True)):
    """The cotangents of gate and up, None where not wanted."""
    ct = launch.contiguous(ct)
    found = [launch.empty(gate.shape, gate.dtype, gate) if it else None for it in wanted]
    _start(BACKWARD, gate, up, lambda gate, up: (ct, gate, up, *found))
    return tuple(found)


def _pullback(ct, wanted, gate, up):
    return swiglu_gradient(ct, gate, up, tuple(map(bool, wanted)))


def _fits(gate, up):
    return gate.dtype == up.dtype and gate.ndim > 0 and 0 < gate.size < MOST


OPS = {"swiglu": Op(swiglu, _pullback, _fits)}
