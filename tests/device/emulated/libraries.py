"""Libraries of machine code for GPUs, which an emulated one can't run, by NumPy: the products of cuBLAS, cuSOLVER's QR
decomposition, CUB's sums and maxima, Thrust's sorting.

cuBLAS and cuSOLVER think in columns: a matrix at an address has its columns `width` elements apart.
Source: NVIDIA, "cuBLAS Library" and "cuSOLVER Library", version 12.9; cupy/cuda/cupy_cub.cu of CuPy 14.2.
"""

import atexit
import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from minitorch_dist.backend import as_dtype

from .cuda import INT, POINTER, SIZE, api, as_c, gpus, put
from .symbols import symbols

TYPES = {0: np.dtype("f4"), 1: np.dtype("f8"), 2: np.dtype("f2"), 14: as_dtype("bfloat16")}     # cudaDataType
ADDS_IN = {68: np.dtype("f4"), 70: np.dtype("f8"), 0: np.dtype("f4"), 1: np.dtype("f8")}        # cublasComputeType


def array_at(address, dtype, shape, strides):
    """The array at an address of a GPU's memory, strides in elements. It must be there, whole."""
    count = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    gpus.check(address, count * dtype.itemsize)
    flat = np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), np.uint8).view(dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [stride * dtype.itemsize for stride in strides])


# ---------------------------------------------------------------- cuBLAS

class Blas:
    """A handle of cuBLAS, or of cuSOLVER."""

    def __init__(self):
        self.stream, self.workspace, self.settings = 0, None, {}


@api("p", "cublasCreate_v2", "cusolverDnCreate", "cusolverSpCreate")
def create(out):
    gpus.refuse_in_capture("makes a handle")
    put(out, POINTER, gpus.handle(Blas()))


@api("p", "cublasDestroy_v2", "cusolverDnDestroy", "cusolverSpDestroy")
def destroy(handle):
    del gpus.handles[handle]


@api("pp", "cublasSetStream_v2", "cusolverDnSetStream")
def set_stream(handle, stream):
    blas = gpus.get(handle, Blas)
    blas.stream, blas.workspace = stream, None


@api("pp", "cublasGetStream_v2")
def get_stream(handle, out):
    put(out, POINTER, gpus.get(handle, Blas).stream)


@api("ppz", "cublasSetWorkspace_v2")
def set_workspace(handle, address, size):
    gpus.check(address, size)
    gpus.get(handle, Blas).workspace = address, size


@api("pi", "cublasSetMathMode", "cublasSetPointerMode_v2")
def set_mode(handle, mode):
    gpus.get(handle, Blas).settings["mode"] = mode


@api("pp", "cublasGetMathMode", "cublasGetPointerMode_v2")
def get_mode(handle, out):
    put(out, INT, 0)


def scalar(address, dtype):
    """A number of the host's."""
    return np.frombuffer(ctypes.string_at(address, dtype.itemsize), dtype)[0]


def product(transposed, m, n, k, alpha, a, b, beta, c, adds_in, count=1):
    """C = alpha op(A) op(B) + beta C, `count` times. a, b, c: (address, dtype, width, elements to the next)."""
    def matrix(operand, rows, columns, flip):
        address, dtype, width, step = operand
        rows, columns = (columns, rows) if flip else (rows, columns)
        if width < max(1, rows):
            raise ValueError(f"a width of {width} for columns of {rows}")
        found = array_at(address, dtype, (count, rows, columns), (step, 1, width))
        return found.swapaxes(1, 2) if flip else found
    left, right, result = matrix(a, m, k, transposed[0]), matrix(b, k, n, transposed[1]), matrix(c, m, n, False)
    # The row-major product, as NumPy makes it of these.
    made = np.matmul(right.swapaxes(1, 2).astype(adds_in), left.swapaxes(1, 2).astype(adds_in)).swapaxes(1, 2)
    result[...] = alpha * made + (beta * result.astype(adds_in) if beta else 0)


def gemm(handle, transposed, m, n, k, alpha, a, b, beta, c, adds_in, count=1):
    """Have cuBLAS's stream make products. alpha and beta are addresses of the host's numbers, read now."""
    blas = gpus.get(handle, Blas)
    if gpus.stream(blas.stream).graph is not None and blas.workspace is None:
        gpus.refuse_in_capture("has cuBLAS take memory")
    alpha, beta = scalar(alpha, adds_in), scalar(beta, adds_in)
    if m * n * count:
        gpus.queue(blas.stream, lambda: product(transposed, m, n, k, alpha, a, b, beta, c, adds_in, count))


@api("piiiii" "p" "pii" "pii" "p" "pii" "ii", "cublasGemmEx")
def gemm_ex(handle, ta, tb, m, n, k, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, adds_in, algorithm):
    gemm(handle, (ta, tb), m, n, k, alpha, (a, TYPES[a_type], lda, 0), (b, TYPES[b_type], ldb, 0), beta,
         (c, TYPES[c_type], ldc, 0), ADDS_IN[adds_in])


@api("piiiii" "p" "piil" "piil" "p" "piil" "iii", "cublasGemmStridedBatchedEx")
def gemm_strided_ex(handle, ta, tb, m, n, k, alpha, a, a_type, lda, a_step, b, b_type, ldb, b_step, beta, c, c_type,
                    ldc, c_step, count, adds_in, algorithm):
    gemm(handle, (ta, tb), m, n, k, alpha, (a, TYPES[a_type], lda, a_step), (b, TYPES[b_type], ldb, b_step), beta,
         (c, TYPES[c_type], ldc, c_step), ADDS_IN[adds_in], count)


def products(letter, dtype):
    """cublasSgemm and cublasSgemmStridedBatched, and those of float64."""
    @api("piiiii" "p" "pi" "pi" "p" "pi", f"cublas{letter}gemm_v2")
    def plain(handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        gemm(handle, (ta, tb), m, n, k, alpha, (a, dtype, lda, 0), (b, dtype, ldb, 0), beta, (c, dtype, ldc, 0), dtype)

    @api("piiiii" "p" "pil" "pil" "p" "pil" "i", f"cublas{letter}gemmStridedBatched")
    def strided(handle, ta, tb, m, n, k, alpha, a, lda, a_step, b, ldb, b_step, beta, c, ldc, c_step, count):
        gemm(handle, (ta, tb), m, n, k, alpha, (a, dtype, lda, a_step), (b, dtype, ldb, b_step), beta,
             (c, dtype, ldc, c_step), dtype, count)


    @api("piiiii" "p" "pi" "pi" "p" "pi" "i", f"cublas{letter}gemmBatched")
    def many(handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, count):
        alpha, beta = scalar(alpha, dtype), scalar(beta, dtype)

        def work():
            tables = [array_at(address, np.dtype("u8"), (count,), (1,)).tolist() for address in (a, b, c)]
            for one, two, three in zip(*tables, strict=True):
                product((ta, tb), m, n, k, alpha, (one, dtype, lda, 0), (two, dtype, ldb, 0), beta,
                        (three, dtype, ldc, 0), dtype)
        gpus.queue(gpus.get(handle, Blas).stream, work)


products("S", TYPES[0])
products("D", TYPES[1])


# ---------------------------------------------------------------- cuSOLVER

def decompositions(letter, dtype):
    """cusolverDnSgeqrf and cusolverDnSorgqr, and those of float64. A = H₁H₂…R, Hᵢ = 1 - τᵢ vᵢvᵢᵀ."""
    @api("piipip", f"cusolverDn{letter}geqrf_bufferSize")
    def geqrf_size(handle, m, n, a, lda, out):
        put(out, INT, max(1, n))

    @api("piiip" "ipp", f"cusolverDn{letter}orgqr_bufferSize")
    def orgqr_size(handle, m, n, k, a, lda, tau, out):
        put(out, INT, max(1, n))

    @api("piipi" "ppip", f"cusolverDn{letter}geqrf")
    def geqrf(handle, m, n, a, lda, tau, room, size, info):
        columns, tau = array_at(a, dtype, (n, m), (lda, 1)), array_at(tau, dtype, (min(m, n),), (1,))

        def work():
            columns[...], tau[...] = np.linalg.qr(columns.T, "raw")
            array_at(info, np.dtype("i4"), (1,), (1,))[...] = 0
        gpus.queue(gpus.get(handle, Blas).stream, work)

    @api("piiipi" "ppip", f"cusolverDn{letter}orgqr")
    def orgqr(handle, m, n, k, a, lda, tau, room, size, info):
        columns, tau = array_at(a, dtype, (n, m), (lda, 1)), array_at(tau, dtype, (k,), (1,))

        def work():
            q = np.eye(m, n, dtype=dtype)
            for i in reversed(range(k)):
                v = np.concatenate([np.zeros(i), [1], columns[i, i + 1:]]).astype(dtype)
                q -= tau[i] * np.outer(v, v @ q)
            columns[...] = q.T
            array_at(info, np.dtype("i4"), (1,), (1,))[...] = 0
        gpus.queue(gpus.get(handle, Blas).stream, work)


decompositions("S", TYPES[0])
decompositions("D", TYPES[1])


# ---------------------------------------------------------------- CUB

# What CuPy's C++ functions are called as symbols, and the numbers that they know types and operations by.
REDUCE, SEGMENTS, SCAN = ("_Z17cub_device_reducePvRmS_S_iP11CUstream_stii",
                          "_Z27cub_device_segmented_reducePvRmS_S_iiP11CUstream_stii",
                          "_Z15cub_device_scanPvRmS_S_iP11CUstream_stii")
NUMBERS = [np.dtype(kind) for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")]
REDUCTIONS = {0: np.add.reduce, 1: np.minimum.reduce, 2: np.maximum.reduce, 3: np.argmin, 4: np.argmax,
              7: np.multiply.reduce}
SCANS = {5: np.add.accumulate, 6: np.multiply.accumulate}
ROOM = 1        # bytes that each wants to work in


@api("ppipii", "_Z36cub_device_reduce_get_workspace_sizePvS_iP11CUstream_stii",
     "_Z34cub_device_scan_get_workspace_sizePvS_iP11CUstream_stii", result=SIZE)
def room(*_):
    return ROOM


@api("ppiipii", "_Z46cub_device_segmented_reduce_get_workspace_sizePvS_iiP11CUstream_stii", result=SIZE)
def room_of_segments(*_):
    return ROOM


@api("ppppipii", REDUCE, result=None)
def reduce(workspace, _, x, y, count, stream, operation, kind):
    """All elements become one, of their type; or the first 4 bytes at y the place of the least or the greatest."""
    reduce_segments(workspace, _, x, y, 1, count, stream, operation, kind)


@api("ppppiipii", SEGMENTS, result=None)
def reduce_segments(workspace, _, x, y, segments, size, stream, operation, kind):
    """The same for each of `segments` stretches of `size` elements. Sums are of the elements' type, step by step."""
    dtype = NUMBERS[kind]
    gpus.check(workspace, ROOM)

    def work():
        found = REDUCTIONS[operation](array_at(x, dtype, (segments, size), (size, 1)), 1) if size else segments * [0]
        array_at(y, np.dtype("i4") if operation in (3, 4) else dtype, (segments,), (1,))[...] = found
    gpus.queue(stream, work)


@api("ppppipii", SCAN, result=None)
def scan(workspace, _, x, y, count, stream, operation, kind):
    """Running sums or products."""
    dtype = NUMBERS[kind]
    gpus.check(workspace, ROOM)

    def work():
        array_at(y, dtype, (count,), (1,))[...] = SCANS[operation](array_at(x, dtype, (count,), (1,)))
    gpus.queue(stream, work)


# ---------------------------------------------------------------- as libraries

# What CuPy calls them, what they are.
LIBRARIES = {"cublas": "libcublas.so.12", "cusolver": "libcusolver.so.11", "nccl": "libnccl.so.2"}


def jumps(soname, names):
    """Load a library of this name whose functions jump to ours: made by the C compiler. Returns it."""
    functions = "".join(f'__attribute__((naked)) void {name}(void) {{ __asm__("jmp *targets+{8 * i}(%rip)"); }}\n'
                        for i, name in enumerate(names))
    source = (f'__attribute__((visibility("hidden"))) void *targets[{len(names)}];\n'
              "void **targets_of_jumps(void) { return targets; }\nint nothing(void) { return 0; }\n" + functions)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "jumps.c").write_text(source)
        (folder / "jumps.map").write_text(f"{soname} {{ global: *; }};\n")
        subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", folder / soname, folder / "jumps.c",
                        f"-Wl,--version-script={folder / 'jumps.map'}"], check=True)
        library = ctypes.CDLL(str(folder / soname))
    library.targets_of_jumps.restype = ctypes.POINTER(POINTER)
    targets = library.targets_of_jumps()
    for i, name in enumerate(names):
        targets[i] = ctypes.cast(as_c(name), POINTER).value
        # CuPy calls them to the very end, when there is no Python left.
        atexit.register(targets.__setitem__, i, ctypes.cast(library.nothing, POINTER).value)
    return library


def load(name, module):
    """Have a library of LIBRARIES, as CuPy's module of this path links it, found in this process. Returns it."""
    names = {symbol for symbol in symbols(module, 11) if symbol.startswith(name)}
    return jumps(LIBRARIES[name], sorted(names | ({"cublasSetWorkspace_v2"} if name == "cublas" else set())))


# ---------------------------------------------------------------- Thrust

class Thrust:
    """CuPy's module cupy.cuda.thrust. NaN comes last."""

    available = True

    def sort(self, dtype, data, keys, shape):
        rows = self._rows(data, dtype, shape)
        rows.sort(axis=-1)

    def argsort(self, dtype, index, data, keys, shape):
        self._rows(index, np.intp, shape)[...] = np.argsort(self._rows(data, dtype, shape), -1, kind="stable")

    def lexsort(self, dtype, index, keys, k, n):
        self._rows(index, np.intp, (n,))[...] = np.lexsort(self._rows(keys, dtype, (k, n)))

    def _rows(self, address, dtype, shape):
        """It waits for the GPU: cupy/cupy issue 9126."""
        with gpus.changed:
            gpus.synchronize()
            strides = [int(np.prod(shape[i + 1:])) for i in range(len(shape))]
            return array_at(address, np.dtype(dtype), tuple(shape), strides)
