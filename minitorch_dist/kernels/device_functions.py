"""Functions of elements that Triton has only from CUDA's library of device functions, and what they are in Triton's
interpreter, which has none of them: NumPy's.

    lib         exp, log, tanh, pow, … : each within an ulp or two, where tl.exp is an approximation
    largest     the maximum of each row of a block (rows, columns), as (rows, 1); NaN where there is one in the row, of
                which tl.max knows nothing
    smallest    the minimum likewise
"""

import math

import numpy as np
import triton
import triton.language as tl

# name -> NumPy's
FUNCTIONS = {"exp": np.exp, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "sin": np.sin, "cos": np.cos,
             "tanh": np.tanh, "sqrt": np.sqrt, "pow": np.power, "fmod": np.fmod,
             "erf": np.vectorize(math.erf, otypes=[np.float64])}


@triton.jit
def _larger(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def _smaller(a, b):
    return tl.where((a < b) | (a != a), a, b)


if hasattr(_larger, "cache_key"):       # a function to be compiled has one
    from triton.language.extra.cuda import libdevice as lib  # noqa: F401

    @triton.jit
    def largest(x):
        return tl.reduce(x, 1, _larger)[:, None]

    @triton.jit
    def smallest(x):
        return tl.reduce(x, 1, _smaller)[:, None]
else:
    class lib:
        """What a kernel calls by these names: numbers behind the interpreter's blocks in, and out."""

    def _block(numbers, dtype):
        from triton.runtime.interpreter import TensorHandle
        numbers = np.asarray(numbers, np.float32 if dtype.is_fp32() else np.float64)
        return tl.core.tensor(TensorHandle(numbers, dtype), tl.block_type(dtype, list(numbers.shape)))

    def _by_numpy(function):
        return staticmethod(lambda *blocks: _block(function(*(b.handle.data for b in blocks)), blocks[0].dtype))

    for _name, _function in FUNCTIONS.items():
        setattr(lib, _name, _by_numpy(_function))

    def largest(x):
        return _block(x.handle.data.max(axis=1, keepdims=True), x.dtype)

    def smallest(x):
        return _block(x.handle.data.min(axis=1, keepdims=True), x.dtype)
