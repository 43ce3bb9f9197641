"""Matrix products by cuBLAS itself, for CUDA graphs.

CuPy's own products refuse to be recorded (its issue 6290: "calling cuBLAS API during stream capture is currently
unsupported"), although cuBLAS can be: what it needs is a workspace that stays where it is. So a graph's products are
asked for here, by cuBLAS's C interface, with the settings that CuPy gives it; float32 is multiplied in float32.

cuBLAS thinks in columns. What lies in memory as a row-major C = X·Y is, read by columns, Cᵀ = Yᵀ·Xᵀ: the operands
change places, and neither is copied where its rows or its columns lie side by side.

Source: NVIDIA, "cuBLAS Library", sections on cublasSetWorkspace, CUDA graphs support and cublasGemmStridedBatchedEx.
"""

import ctypes
import math

import numpy as np

from ..backend import load_cupy
from .launch import contiguous, empty

WORKSPACE = 32 << 20        # bytes: what cuBLAS takes for itself on a Hopper GPU


def load_library():
    """The library of cuBLAS's C functions: the one that CuPy's products have loaded."""
    return ctypes.CDLL(f"libcublas.so.{load_cupy().cuda.runtime.runtimeGetVersion() // 1000}")


class Cublas:
    """cuBLAS on one stream.

    stream     the number of a CUDA stream, the current one
    workspace  an array on the device; it must live as long as what was recorded
    """

    def __init__(self, stream, workspace):
        names, runtime = load_cupy().cuda.cublas, load_cupy().cuda.runtime
        self.blas = load_library()
        self.workspace, self.handle = workspace, ctypes.c_void_p()
        self.plain, self.transposed = names.CUBLAS_OP_N, names.CUBLAS_OP_T
        # dtype -> (cuBLAS's name of it, what it is added up in, the ctype of 1 and 0)
        single = names.CUBLAS_COMPUTE_32F, ctypes.c_float
        self.types = {"float16": (runtime.CUDA_R_16F, *single), "bfloat16": (runtime.CUDA_R_16BF, *single),
                      "float32": (runtime.CUDA_R_32F, *single),
                      "float64": (runtime.CUDA_R_64F, names.CUBLAS_COMPUTE_64F, ctypes.c_double)}
        # Before Ampere its tensor cores knew float16 alone, and this setting has float32 rounded to it.
        modern = int(load_cupy().cuda.Device().compute_capability) >= 80
        self.algorithms = {name: names.CUBLAS_GEMM_DEFAULT_TENSOR_OP if modern or name == "float16" else
                           names.CUBLAS_GEMM_DEFAULT for name in self.types}
        self._call("cublasCreate_v2", ctypes.byref(self.handle))
        # In this order: another stream brings the default workspace back.
        self._call("cublasSetStream_v2", self.handle, ctypes.c_void_p(stream))
        self._call("cublasSetWorkspace_v2", self.handle, ctypes.c_void_p(workspace.data.ptr),
                   ctypes.c_size_t(workspace.nbytes))

    def close(self):
        """Give the handle back; the graphs that were recorded stay."""
        self._call("cublasDestroy_v2", self.handle)

    def _call(self, name, *args):
        status = getattr(self.blas, name)(*args)
        if status:
            raise RuntimeError(f"{name} failed with status {status}")

    def matmul(self, x, y, out=None):
        """x @ y: x (…, m, k), y (…, k, n) of one floating dtype; leading axes broadcast. `out`,
        where given, is a C-contiguous array of the product's shape and dtype."""
        if x.ndim < 2 or y.ndim < 2 or x.shape[-1] != y.shape[-2]:
            raise ValueError(f"matmul: x {x.shape} and y {y.shape} must be (…, m, k) and (…, k, n)")
        if x.dtype != y.dtype or x.dtype.name not in self.types:
            raise TypeError(f"matmul: x of {x.dtype} and y of {y.dtype}; in a CUDA graph both must be one of "
                            f"{', '.join(self.types)}")
        leading = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        (m, k), n = x.shape[-2:], y.shape[-1]
        if out is None:
            out = empty((*leading, m, n), x.dtype, x)
        elif out.shape != (*leading, m, n) or out.dtype != x.dtype or not out.flags.c_contiguous:
            raise ValueError(f"matmul: out {out.shape} of {out.dtype}, strides {out.strides}; it must be C-contiguous, "
                             f"{(*leading, m, n)} of {x.dtype}")
        if out.size and not k:
            out.fill(0)
        elif out.size:
            self._gemm(matrices(x, leading), matrices(y, leading), out, m, n, k, math.prod(leading))
        return out

    def _gemm(self, x, y, out, m, n, k, count):
        (x, x_columns, x_width, x_step), (y, y_columns, y_width, y_step) = x, y
        kind, adds_in, number = self.types[out.dtype.name]
        algorithm = self.algorithms[out.dtype.name]
        if max(m, n, k, count, x_width, y_width) >= 2 ** 31:
            raise ValueError(f"matmul: {count} products of {m} x {k} by {k} x {n}, rows {x_width} and {y_width} "
                             "elements apart; cuBLAS takes less than 2³¹ of each")
        sizes = [ctypes.c_int(size) for size in (n, m, k)]
        first = ctypes.c_void_p(y.data.ptr), kind, ctypes.c_int(y_width)
        second = ctypes.c_void_p(x.data.ptr), kind, ctypes.c_int(x_width)
        result = ctypes.c_void_p(out.data.ptr), kind, ctypes.c_int(n)
        orders = [self.transposed if columns else self.plain for columns in (y_columns, x_columns)]
        one, zero = ctypes.byref(number(1)), ctypes.byref(number(0))
        if count == 1:
            self._call("cublasGemmEx", self.handle, *orders, *sizes, one, *first, *second, zero, *result, adds_in,
                       algorithm)
        else:
            self._call("cublasGemmStridedBatchedEx", self.handle, *orders, *sizes, one, *first,
                       ctypes.c_longlong(y_step), *second, ctypes.c_longlong(x_step), zero, *result,
                       ctypes.c_longlong(m * n), ctypes.c_int(count), adds_in, algorithm)


def matrices(x, leading):
    """(array, whether it is the columns that lie side by side, elements from one row (or column) to the next, elements
    from one matrix to the next) of `leading` matrices; a copy where cuBLAS can't take x as it lies."""
    rows, columns = x.shape[-2:]
    if math.prod(x.shape[:-2]) == 1:
        x, step = x.reshape(rows, columns), 0
    else:
        if x.shape[:-2] != leading:
            x = np.broadcast_to(x, (*leading, rows, columns))
        step = rows * columns
        if not x.swapaxes(-1, -2).flags.c_contiguous:
            x = contiguous(x)
    by_row, by_column = (s // x.itemsize for s in x.strides[-2:])
    if (by_column == 1 or columns == 1) and by_row >= columns:
        return x, False, by_row, step
    if (by_row == 1 or rows == 1) and by_column >= rows:
        return x, True, by_column, step
    return contiguous(x), False, columns, step
