"""Tensors made out of nothing, with torch's names and defaults.

    mt.zeros(2, 3)        mt.arange(5, device="cuda")        mt.randn(64, 10, requires_grad=True)

dtype is float32 unless given (arange of ints: int64); device a name, see backend. The random ones draw from the
library's default stream (manual_seed), on the host: the same numbers on every device, and on every rank. Inside of a
random_scope, as training steps are, those whose first axis runs over the samples here (or a multiple of them) belong to
the samples, whatever the number of ranks; others are the same on all ranks.
"""

from ..backend import as_dtype, is_whole, module_on, normal_rows, on, random_rows, to, wholes, xp
from .primitive import lower
from .tensor import Tensor


def _shape(shape):
    """f(2, 3) and f((2, 3)) mean the same."""
    return wholes("shape", shape[0] if len(shape) == 1 else shape)


def _made(array, device, requires_grad):
    return Tensor(to(array, device)).requires_grad_(requires_grad)


def full(shape, value, dtype=None, device="cpu", requires_grad=False):
    """`value` everywhere; the dtype, unless given, is float32, int64 or bool, after the value."""
    shape = wholes("shape", shape)
    if dtype is None:
        dtype = xp.bool_ if isinstance(value, (bool, xp.bool_)) else xp.int64 if is_whole(value) else xp.float32
    dtype = as_dtype(dtype)
    with on(device):        # filled where it shall live: nothing is sent
        return Tensor(module_on(device).full(shape, value, dtype)).requires_grad_(requires_grad)


def zeros(*shape, dtype=xp.float32, device="cpu", requires_grad=False):
    """0 everywhere."""
    return full(_shape(shape), 0, dtype, device, requires_grad)


def ones(*shape, dtype=xp.float32, device="cpu", requires_grad=False):
    """1 everywhere."""
    return full(_shape(shape), 1, dtype, device, requires_grad)


def zeros_like(x, dtype=None, requires_grad=False):
    """0 everywhere, in x's shape, dtype and device."""
    return full(x.shape, 0, dtype or x.dtype, Tensor(lower(x)).device, requires_grad)


def ones_like(x, dtype=None, requires_grad=False):
    """1 everywhere, in x's shape, dtype and device."""
    return full(x.shape, 1, dtype or x.dtype, Tensor(lower(x)).device, requires_grad)


def eye(n, dtype=xp.float32, device="cpu", requires_grad=False):
    """The identity matrix (n, n)."""
    return _made(xp.eye(n, dtype=as_dtype(dtype)), device, requires_grad)


def arange(*bounds, dtype=None, device="cpu", requires_grad=False):
    """arange(stop), arange(start, stop) or arange(start, stop, step), as np.arange; floats in float32."""
    array = xp.arange(*bounds)
    dtype = dtype or {"f": xp.float32}.get(array.dtype.kind, xp.int64)
    return _made(array.astype(as_dtype(dtype)), device, requires_grad)


def rand(*shape, dtype=xp.float32, device="cpu", requires_grad=False):
    """Uniform in [0, 1)."""
    return _made(random_rows(_shape(shape)).astype(as_dtype(dtype)), device, requires_grad)


def randn(*shape, dtype=xp.float32, device="cpu", requires_grad=False):
    """The standard normal distribution."""
    return _made(normal_rows(_shape(shape)).astype(as_dtype(dtype)), device, requires_grad)
