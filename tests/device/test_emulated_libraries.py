"""What libraries do on the emulated GPUs, by the entries that CuPy calls: cuBLAS, cuSOLVER, Thrust, CUB; and the
symbols of a library's file."""

import ctypes
import math

import numpy as np
import pytest

from .emulated import libraries
from .emulated.cuda import API, gpus
from .emulated.machine import NULL, CudaError
from .emulated.symbols import symbols
from .on_emulated import down, up


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("flips", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_products_in_columns(count, flips, dtype):
    """C = αAB + βC by NumPy on arrays in Fortran's order, with columns farther apart than they are long."""
    rng, dtype = np.random.default_rng(count), np.dtype(dtype)
    m, n, k, more = 5, 4, 3, 2
    shapes = [((k, m) if flips[0] else (m, k)), ((n, k) if flips[1] else (k, n)), (m, n)]
    kept = [rng.standard_normal((count, columns, rows + more)).astype(dtype) for rows, columns in shapes]
    a, b, c = (np.swapaxes(x, 1, 2)[:, :rows] for x, (rows, _) in zip(kept, shapes, strict=True))
    left, right = (np.swapaxes(x, 1, 2) if flip else x for x, flip in zip((a, b), flips, strict=True))
    wanted = 2 * np.einsum("bij,bjk->bik", left, right) - 0.5 * c
    at = [up(gpus, x) for x in kept]
    one, half = np.array(2, dtype), np.array(-0.5, dtype)
    handle, steps = gpus.handle(libraries.Blas()), [math.prod(x.shape[1:]) for x in kept]
    widths = [rows + more for rows, _ in shapes]
    API[f"cublas{'S' if dtype == 'f4' else 'D'}gemmStridedBatched"][2](
        handle, *flips, m, n, k, one.ctypes.data, at[0], widths[0], steps[0], at[1], widths[1], steps[1],
        half.ctypes.data, at[2], widths[2], steps[2], count)
    found = np.swapaxes(down(gpus, at[2], kept[2]), 1, 2)
    np.testing.assert_allclose(found[:, :m], wanted, rtol=1e-5 if dtype == "f4" else 1e-12, atol=1e-5)
    np.testing.assert_array_equal(found[:, m:], np.swapaxes(kept[2], 1, 2)[:, m:])


@pytest.mark.parametrize("m, n", [(7, 3), (4, 4), (1, 1)])
def test_qr(m, n):
    """Reflections that make R, and Q out of them: QR = A, QᵀQ = 1."""
    a = np.random.default_rng(m).standard_normal((m, n))
    handle, at, tau = gpus.handle(libraries.Blas()), up(gpus, a.T), gpus.allocate(8 * n)
    info = gpus.allocate(4)
    API["cusolverDnDgeqrf"][2](handle, m, n, at, m, tau, 0, 0, info)
    r = np.triu(down(gpus, at, a.T).T)[:n]
    API["cusolverDnDorgqr"][2](handle, m, n, n, at, m, tau, 0, 0, info)
    q = down(gpus, at, a.T).T
    np.testing.assert_allclose(q @ r, a, atol=1e-12)
    np.testing.assert_allclose(q.T @ q, np.eye(n), atol=1e-12)
    assert down(gpus, info, np.zeros(1, "i4")) == 0


def test_sorting():
    rows = np.random.default_rng(0).integers(0, 5, (3, 9)).astype("f4")
    at, index, thrust = up(gpus, rows), gpus.allocate(8 * rows.size), libraries.Thrust()
    thrust.argsort("f4", index, at, 0, rows.shape)
    np.testing.assert_array_equal(down(gpus, index, np.zeros(rows.shape, np.intp)), np.argsort(rows, 1, "stable"))
    thrust.sort("f4", at, 0, rows.shape)
    np.testing.assert_array_equal(down(gpus, at, rows), np.sort(rows))


X8 = np.array([[3, -1, 4], [np.nan, 5, -9]])


@pytest.mark.parametrize("kind, dtype", [(9, "f4"), (10, "f8"), (6, "i8")])
def test_sums_and_maxima_by_cub(kind, dtype):
    """Of all elements, of stretches, and running; by CuPy's numbers of operations and types."""
    x = (X8 if dtype[0] == "f" else np.nan_to_num(X8)).astype(dtype)
    at, out, work = up(gpus, x), gpus.allocate(8 * x.size), gpus.allocate(libraries.ROOM)
    for number, function in ((0, np.sum), (1, np.min), (2, np.max), (3, np.argmin), (4, np.argmax), (7, np.prod)):
        API[libraries.REDUCE][2](work, 0, at, out, x.size, NULL, number, kind)
        wanted = np.asarray(function(x)).astype("i4" if number in (3, 4) else dtype)
        np.testing.assert_array_equal(down(gpus, out, wanted), wanted)
    API[libraries.SEGMENTS][2](work, 0, at, out, 2, 3, NULL, 2, kind)
    np.testing.assert_array_equal(down(gpus, out, x[:, 0]), x.max(1))
    API[libraries.REDUCE][2](work, 0, 0, out, 0, NULL, 0, kind)
    assert down(gpus, out, x[:1, 0]) == 0
    API[libraries.SCAN][2](work, 0, at, at, x.size, NULL, 5, kind)
    np.testing.assert_array_equal(down(gpus, at, x), np.cumsum(x).reshape(2, 3))
    with pytest.raises(CudaError, match="not in the GPU's memory"):
        API[libraries.REDUCE][2](0, 0, at, out, x.size, NULL, 0, kind)


def test_symbols_of_a_library():
    """A module of NumPy's, by its dynamic symbols: what the loader gives is what the file says."""
    path = np._core._multiarray_umath.__file__
    offset = symbols(path, 11)["PyInit__multiarray_umath"]
    with open("/proc/self/maps") as maps:
        base = next(int(line.split("-")[0], 16) for line in maps if path in line)
    function = ctypes.CDLL(path).PyInit__multiarray_umath
    assert ctypes.cast(function, ctypes.c_void_p).value == base + offset
