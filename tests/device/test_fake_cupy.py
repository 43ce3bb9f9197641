"""What the stand-in claims of CuPy. The same claims are put to CuPy itself in test_gpu.py."""

import numpy as np
import pytest

from .fake_cupy import installed, transfers

# Each takes the module, a float32 array 0 … 5 of shape (2, 3) and int64 indices 0, 1 on the GPU.
REFUSED = [
    (TypeError, lambda cupy, x, i: np.add(x, np.ones(3))),
    (TypeError, lambda cupy, x, i: x + np.ones((2, 3), np.float32)),
    (TypeError, lambda cupy, x, i: np.ones((2, 3), np.float32) * x),
    (TypeError, lambda cupy, x, i: np.asarray(x)),
    (TypeError, lambda cupy, x, i: np.concatenate([x, np.ones((1, 3), np.float32)])),
    (TypeError, lambda cupy, x, i: np.where(np.ones((2, 3), bool), x, x)),
    (AttributeError, lambda cupy, x, i: np.where(True, x, x)),
    (TypeError, lambda cupy, x, i: np.add(x, x, out=np.empty((2, 3), np.float32))),
    (TypeError, lambda cupy, x, i: cupy.matmul(x, x.T, cupy.empty((2, 2), np.float32))),
    (TypeError, lambda cupy, x, i: x.max(initial=0)),
    (TypeError, lambda cupy, x, i: np.ascontiguousarray(x)),
    (TypeError, lambda cupy, x, i: np.add.at(cupy.zeros(3, np.int16), i, 1)),
    (TypeError, lambda cupy, x, i: np.add.at(x, (i, i), cupy.ones(2, "f4"))),     # cupy.add.at takes a tuple
    (TypeError, lambda cupy, x, i: np.may_share_memory(x, np.ones(3))),
    (ValueError, lambda cupy, x, i: x.__setitem__(0, np.ones(3, np.float32))),
    (ValueError, lambda cupy, x, i: np.copyto(x, np.ones((2, 3), np.float32))),
    (ValueError, lambda cupy, x, i: bool(x)),
    (ValueError, lambda cupy, x, i: cupy.argsort(x, 0, "mergesort")),
    (TypeError, lambda cupy, x, i: hash(x)),
    (AttributeError, lambda cupy, x, i: x.flags.writeable),
    (AttributeError, lambda cupy, x, i: x.ctypes),
    (IndexError, lambda cupy, x, i: x[x]),
    (IndexError, lambda cupy, x, i: x[2]),
    (TypeError, lambda cupy, x, i: x.get(out=[])),
    (TypeError, lambda cupy, x, i: x.set([[0.0] * 3] * 2)),
    (TypeError, lambda cupy, x, i: cupy.einsum("ij->i", x, casting="no")),
]
GIVEN = [       # (what it gives, as a list or number, and its dtype)
    (15.0, "f4", lambda cupy, x, i: x.sum()),
    (15.0, "f4", lambda cupy, x, i: np.sum(x)),
    ([[2, 0]], "i8", lambda cupy, x, i: (i[::-1] * 2)[None]),
    ([1, 2, 0], "f4", lambda cupy, x, i: x[0, cupy.array([1, 5, -3])]),         # modulo the extent
    ([3.0, 4.0, 5.0], "f4", lambda cupy, x, i: x[cupy.array(3)]),
    ([0.0, 4.0], "f4", lambda cupy, x, i: x[i, i]),
    ([4.0, 5.0], "f4", lambda cupy, x, i: x[x > 3]),
    ([0.0, 5.0, 4.0], "f4", lambda cupy, x, i: filled(x[0], x[0] > 0, x[1, :0:-1])),
    ([2.0, 3.0, 4.0], "f4", lambda cupy, x, i: (np.float32(2) + x)[0]),
    ([0.0, 1.5, 3.0], "f8", lambda cupy, x, i: (np.float64(1.5) * x)[0]),
    ([0.0, 1.5, 3.0], "f4", lambda cupy, x, i: (1.5 * x)[0]),
    ([0.0, 0.5, 0.5], "f8", lambda cupy, x, i: (0.5 * (x > 0))[0]),
    ([0, 1, 2], "i8", lambda cupy, x, i: np.arange(3, like=x)),
    ([0.0, 3.0], "f4", lambda cupy, x, i: np.take_along_axis(x, i[:, None] * 0, 1)[:, 0]),
    ([[5.0], [2.0]], "f4", lambda cupy, x, i: np.flip(x)[:, :1]),
    ([[2.0, 5.0]], "f4", lambda cupy, x, i: x.max(axis=1, keepdims=True).reshape(1, -1)),
    (5, "i8", lambda cupy, x, i: x.argmax()),
    (True, "?", lambda cupy, x, i: x.any()),
    ([[5.0, 14.0], [14.0, 50.0]], "f4", lambda cupy, x, i: x @ x.T),
    ([[5.0, 14.0], [14.0, 50.0]], "f4", lambda cupy, x, i: np.einsum("ij,kj->ik", x, x, optimize=True)),
    ([[1.0, 2.0], [4.0, 10.0]], "f4", lambda cupy, x, i: np.cumprod(x[:, 1:], 0, out=x[:, 1:])),
    ([1.0, 3.0, 1.0], "f4", lambda cupy, x, i: added(cupy, cupy.ones(3, "f4"), cupy.array([1, 1]))),
    ([1, 3, 1], "i8", lambda cupy, x, i: added(cupy, cupy.ones(3, "i8"), cupy.array([1, 1]))),
    ([[0.0, 3.0, 2.0], [3.0, 4.0, 5.0]], "f4", lambda cupy, x, i: added(cupy, x, (i * 0, cupy.array([1, 1])))),
    ([[2.0, 0.0], [5.0, 3.0]], "f4", lambda cupy, x, i: x.take(cupy.array([-1, 3]), 1)),
    ([0.0, 5.0], "f4", lambda cupy, x, i: x.take(cupy.array([0, 5]))),
    ([0.0, 0.0, 1.0, 1.0, 2.0, 2.0], "f4", lambda cupy, x, i: x[0].repeat(2)),
    ([255, 1], "i8", lambda cupy, x, i: cupy.arange(300)[cupy.array([255, 1], "u1")]),      # no narrower than indices
]


def filled(x, where, values):
    x[where] = values
    return x


def added(cupy, x, places):
    cupy.add.at(x, places, cupy.ones(2, x.dtype))
    return x


def hold(cupy):
    """The claims, on one module's arrays."""
    def arrays():
        return cupy.asarray(np.arange(6, dtype="f4").reshape(2, 3)), cupy.array([0, 1])
    for number, (error, call) in enumerate(REFUSED):
        with pytest.raises(error):
            call(cupy, *arrays())
            pytest.fail(f"REFUSED[{number}] was not refused")
    for number, (value, dtype, call) in enumerate(GIVEN):
        result = call(cupy, *arrays())
        assert type(result) is cupy.ndarray and result.dtype == np.dtype(dtype), number
        np.testing.assert_allclose(result.get(), value, err_msg=str(number))


def test_claims():
    with installed() as cupy:
        hold(cupy)


def test_copies_are_counted():
    with installed() as cupy:
        x = cupy.asarray(np.ones(3))
        for copy in (lambda: x[np.array([0])], lambda: x[[1]], x.get, lambda: float(x[0]), lambda: bool(x[1]),
                     lambda: x[0].item(), lambda: x.set(np.ones(3)), lambda: cupy.asarray(2.0)):
            copy()
        assert dict(transfers) == {"up": 2, "implicit": 2, "down": 4}
