"""Vector add, the kernel to read first: out = x + y.

Nothing is fused and nothing saved: 12 bytes per float32 element (read x, read y, write out), as with CuPy's own `+`. It
shows the parts that every kernel has. A grid of programs runs, each on BLOCK neighbouring elements; a program finds its
own from its number, and a mask keeps the last one from reading and writing past the end.

    program      0               1               2
    x        |--------------|--------------|-------XXXXXXX      X: masked
    y        |--------------|--------------|-------XXXXXXX
    out      |--------------|--------------|-------XXXXXXX
"""

import triton
import triton.language as tl

from . import launch
from .kernel import Kernel


@triton.jit
def _add(x, y, out, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    total = tl.load(x + places, mask=inside).to(tl.float32) + tl.load(y + places, mask=inside).to(tl.float32)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)


def definition(x, y):
    """The same in NumPy."""
    return x + y


ADD = Kernel(
    "add", _add, {"x": "*", "y": "*", "out": "*", "n": "i32"}, {"BLOCK": 1024}, divisible=("n",),
    examples=({"*": "fp32"}, {"*": "fp16"}, {"*": "bf16"}),
    configs=tuple({"BLOCK": block, "num_warps": warps} for block in (512, 1024, 2048, 4096) for warps in (4, 8)))
KERNELS = (ADD,)


def add(x, y):
    """x + y of two arrays of one shape and floating dtype, at most 32 bits wide, C-contiguous."""
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"add: x {x.shape} of {x.dtype} and y {y.shape} of {y.dtype} must be alike")
    out = launch.empty(x.shape, x.dtype, x)
    ADD((triton.cdiv(x.size, ADD.constexprs["BLOCK"]),), x, y, out, x.size)
    return out
