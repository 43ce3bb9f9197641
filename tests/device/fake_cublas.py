"""A stand-in for the C library libcublas: products on the addresses that it is given, now or in the graph that is being
recorded. It refuses what cuBLAS refuses, by a status."""

import ctypes
import struct
from types import SimpleNamespace

import numpy as np

from minitorch_dist.backend import as_dtype

from .fake_cuda import get_current_stream, recorded

INVALID = 7
NAMES = SimpleNamespace(CUBLAS_OP_N=0, CUBLAS_OP_T=1, CUBLAS_COMPUTE_32F=68, CUBLAS_COMPUTE_64F=70,
                        CUBLAS_GEMM_DEFAULT=-1, CUBLAS_GEMM_DEFAULT_TENSOR_OP=99)
TYPES = {0: (np.float32, 68), 1: (np.float64, 70), 2: (np.float16, 68), 14: (as_dtype("bfloat16"), 68)}
algorithms = []     # of cublasGemmEx, in order
calls = []      # (function, sizes, addresses of the operands), in order


class FakeCublas:
    """What ctypes would load. A handle is open between Create and Destroy, and needs a stream and a workspace."""

    def __init__(self):
        self.open, self.stream, self.workspace = False, None, None

    def cublasCreate_v2(self, handle):
        assert recorded() is None, "cuBLAS takes memory for a handle"
        handle._obj.value, self.open = 64, True
        return 0

    def cublasDestroy_v2(self, handle):
        self.open = False
        return 0

    def cublasSetStream_v2(self, handle, stream):
        self.stream, self.workspace = stream.value or 0, None
        return 0

    def cublasSetWorkspace_v2(self, handle, address, size):
        self.workspace = address.value, size.value
        return 0 if size.value else INVALID

    def cublasGemmEx(self, handle, trans_a, trans_b, m, n, k, one, a, a_type, lda, b, b_type, ldb, zero, c, c_type, ldc,
                     adds_in, algorithm):
        calls.append(("gemm", (m.value, n.value, k.value), {a.value, b.value}))
        algorithms.append(algorithm)
        return self._gemm(trans_a, trans_b, m, n, k, one, a, a_type, lda, 0, b, b_type, ldb, 0, zero, c, c_type, ldc, 0,
                          1, adds_in)

    def cublasGemmStridedBatchedEx(self, handle, trans_a, trans_b, m, n, k, one, a, a_type, lda, step_a, b, b_type, ldb,
                                   step_b, zero, c, c_type, ldc, step_c, count, adds_in, algorithm):
        calls.append(("batched", (m.value, n.value, k.value, count.value), {a.value, b.value}))
        steps = [s.value for s in (step_a, step_b, step_c)]
        assert all(isinstance(s, ctypes.c_longlong) for s in (step_a, step_b, step_c))
        return self._gemm(trans_a, trans_b, m, n, k, one, a, a_type, lda, steps[0], b, b_type, ldb, steps[1], zero, c,
                          c_type, ldc, steps[2], count.value, adds_in)

    def _gemm(self, trans_a, trans_b, m, n, k, one, a, a_type, lda, step_a, b, b_type, ldb, step_b, zero, c, c_type,
              ldc, step_c, count, adds_in):
        if not self.open or self.workspace is None or self.stream != get_current_stream().ptr:
            return 1
        m, n, k, lda, ldb, ldc = (x.value for x in (m, n, k, lda, ldb, ldc))
        dtype, wanted = TYPES[c_type]
        if not a_type == b_type == c_type or adds_in != wanted:
            return INVALID
        if lda < max(1, k if trans_a else m) or ldb < max(1, n if trans_b else k) or ldc < max(1, m):
            return INVALID
        kind, size = ("d", 8) if adds_in == 70 else ("f", 4)
        assert [struct.unpack(kind, ctypes.string_at(x, size))[0] for x in (one, zero)] == [1, 0]

        def column_major(address, rows, columns, width, step):
            elements = (count - 1) * step + (columns - 1) * width + rows
            flat = np.frombuffer((ctypes.c_char * (elements * np.dtype(dtype).itemsize)).from_address(address), dtype)
            strides = tuple(s * flat.itemsize for s in (step, 1, width))
            return np.lib.stride_tricks.as_strided(flat, (count, rows, columns), strides)
        left = column_major(a.value, *((k, m) if trans_a else (m, k)), lda, step_a)
        right = column_major(b.value, *((n, k) if trans_b else (k, n)), ldb, step_b)
        result = column_major(c.value, m, n, ldc, step_c)
        left = left.swapaxes(1, 2) if trans_a else left
        right = right.swapaxes(1, 2) if trans_b else right

        def product():
            # The very product that NumPy makes of the row-major matrices: to the last bit.
            result.swapaxes(1, 2)[...] = np.matmul(right.swapaxes(1, 2), left.swapaxes(1, 2))
        product() if recorded() is None else recorded().work.append(product)
        return 0
