"""Products by cuBLAS's C interface, on the stand-in: against NumPy's, wherever rows and columns lie."""

import numpy as np
import pytest

from minitorch_dist.backend import load_cupy
from minitorch_dist.kernels import cublas

from . import fake_cublas
from .test_cuda_graphs import gpu, made  # noqa: F401

PRODUCTS = {    # name -> (x, y) made from C-contiguous arrays
    "plain": lambda: (made(5, 3), made(3, 7)),
    "transposed": lambda: (made(3, 5).T, made(7, 3).T),
    "one transposed": lambda: (made(5, 3), made(7, 3).T),
    "rows of more": lambda: (made(9, 3)[2:7], made(3, 9)[:, 1:8]),
    "columns of more": lambda: (made(5, 9)[:, 2:5], made(9, 3)[1:8].T),
    "every other column": lambda: (made(5, 6)[:, ::2], made(6, 7)[::2]),
    "backwards": lambda: (made(5, 3)[::-1], made(3, 7)[:, ::-1]),
    "a row": lambda: (made(1, 3), made(3, 7)),
    "a column": lambda: (made(5, 3), made(3, 1)),
    "a row of more": lambda: (made(4, 3)[1:2], made(3, 7)),
    "a column of more": lambda: (made(5, 3), made(3, 4)[:, 1:2]),
    "outer": lambda: (made(5, 1), made(1, 7)),
    "one number": lambda: (made(1, 1), made(1, 1)),
    "repeated row": lambda: (np.broadcast_to(made(3), (5, 3)), made(3, 7)),
    "float64": lambda: (made(5, 3, dtype="f8"), made(3, 7, dtype="f8")),
    "many": lambda: (made(2, 4, 5, 3), made(2, 4, 3, 7)),
    "many, transposed": lambda: (made(4, 3, 5).swapaxes(1, 2), made(4, 7, 3).swapaxes(1, 2)),
    "many by one": lambda: (made(4, 5, 3), made(3, 7)),
    "one by many": lambda: (made(1, 3, 7).swapaxes(1, 2), made(4, 3, 5)),
    "broadcast both ways": lambda: (made(2, 1, 5, 3), made(4, 3, 7)),
    "every other matrix": lambda: (made(4, 5, 3)[::2], made(2, 3, 7)),
    "many rows of more": lambda: (made(4, 9, 3)[:, 2:7], made(4, 3, 7)),
    "nothing to add": lambda: (made(5, 0), made(0, 7)),
    "no rows": lambda: (made(0, 3), made(3, 7)),
    "no matrices": lambda: (made(0, 5, 3), made(0, 3, 7)),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("with_out", [False, True])
def test_products(name, with_out):
    cupy = load_cupy()
    addresses = check_product(cupy, name, with_out)
    for _, _, used in fake_cublas.calls:
        assert (used != addresses) == (name in COPIED)
    assert len(fake_cublas.calls) == (name not in ("nothing to add", "no rows", "no matrices"))


def check_product(cupy, name, with_out):
    """Against NumPy's, wherever rows and columns lie. Returns the operands' addresses."""
    xs = PRODUCTS[name]()
    # The same strides on the GPU: the whole array up, then the view.
    views = [cupy.lib.stride_tricks.as_strided(cupy.asarray(np.array(base)).reshape(-1)[offset:], x.shape, x.strides)
             for x in xs for base, offset in [whole(x)]]
    expected = np.matmul(*xs)
    out = cupy.full(expected.shape, np.nan, expected.dtype) if with_out else None
    handle = cublas.Cublas(cupy.cuda.get_current_stream().ptr, cupy.empty(cublas.WORKSPACE, np.uint8))
    found = handle.matmul(*views, out)
    handle.close()
    assert found is out or not with_out
    np.testing.assert_allclose(found.get(), expected, rtol=1e-6, atol=1e-6)
    for view, x in zip(views, xs, strict=True):
        np.testing.assert_array_equal(view.get(), x)
    return {view.data.ptr for view in views}


COPIED = {"every other column", "backwards", "repeated row", "broadcast both ways", "every other matrix",
          "many rows of more"}


def whole(x):
    """(the array that x is a view into, how many elements of it come before x)."""
    base = x if x.base is None else x.base
    while base.base is not None:
        base = base.base
    bytes_before = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return base, bytes_before // x.itemsize


@pytest.mark.parametrize("x, y, out, error, what", [
    (made(5, 3), made(4, 7), None, ValueError, r"x \(5, 3\) and y \(4, 7\)"),
    (made(3), made(3, 7), None, ValueError, r"x \(3,\)"),
    (made(5, 3), made(3, 7, dtype="f8"), None, TypeError, "x of float32 and y of float64"),
    (np.ones((5, 3), "i4"), np.ones((3, 7), "i4"), None, TypeError, "int32"),
    (made(5, 3), made(3, 7), made(5, 6), ValueError, r"out \(5, 6\)"),
    (made(5, 3), made(3, 7), made(5, 7, dtype="f8"), ValueError, "of float64"),
    (made(5, 3), made(3, 7), made(7, 5).T, ValueError, "C-contiguous"),
], ids=str)
def test_products_that_do_not_fit(x, y, out, error, what):
    cupy = load_cupy()
    handle = cublas.Cublas(cupy.cuda.get_current_stream().ptr, cupy.empty(512, np.uint8))
    if out is not None:
        out = cupy.asarray(out.T if out.flags.f_contiguous else out)
        out = out.T if out.shape == (7, 5) else out
    with pytest.raises(error, match=what):
        handle.matmul(cupy.asarray(x), cupy.asarray(y), out)


@pytest.mark.parametrize("capability, expected", [("75", [99, -1, -1]), ("80", [99, 99, 99])])
def test_products_are_no_less_exact_than_cupys(monkeypatch, capability, expected):
    cupy = load_cupy()
    """CUBLAS_GEMM_DEFAULT_TENSOR_OP rounds float32 to float16 on a GPU before Ampere: CuPy takes it from 80 on."""
    monkeypatch.setattr(cupy.cuda.Device, "compute_capability", capability)
    handle = cublas.Cublas(cupy.cuda.get_current_stream().ptr, cupy.empty(512, np.uint8))
    fake_cublas.algorithms.clear()
    for dtype in ("f2", "f4", "f8"):
        handle.matmul(cupy.ones((2, 2), dtype), cupy.ones((2, 2), dtype))
    assert fake_cublas.algorithms == expected


def test_sizes_beyond_cublas_are_refused():
    cupy = load_cupy()
    handle = cublas.Cublas(cupy.cuda.get_current_stream().ptr, cupy.empty(512, np.uint8))
    x = cupy.lib.stride_tricks.as_strided(cupy.ones(2), (1, 2, 2), (8, 2 ** 34, 8))
    with pytest.raises(ValueError, match="2147483648 and 2 elements apart; cuBLAS takes less than 2³¹"):
        handle.matmul(x, cupy.ones((2, 2)))


def test_cublas_says_which_function_failed():
    cupy = load_cupy()
    handle = cublas.Cublas(cupy.cuda.get_current_stream().ptr, cupy.empty(512, np.uint8))
    handle.close()
    with pytest.raises(RuntimeError, match="cublasGemmEx failed with status 1"):
        handle.matmul(cupy.ones((2, 2)), cupy.ones((2, 2)))
