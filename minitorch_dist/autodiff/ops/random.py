"""Random numbers from explicit streams (generators of backend.stream): constants for differentiation.

The same stream in the same state gives the same numbers; there is no hidden one.
"""

from ... import backend
from ...backend import xp
from ..primitive import lower
from .elementwise import astype


def uniform(stream, shape, low=0.0, high=1.0, dtype=xp.float32):
    """Numbers from [low, high)."""
    return _tensor(_draw(stream.random, shape, dtype) * (high - low) + low)


def normal(stream, shape, mean=0.0, std=1.0, dtype=xp.float32):
    """Numbers of the normal distribution."""
    return _tensor(_draw(stream.standard_normal, shape, dtype) * std + mean)


def bernoulli(stream, shape, p=0.5):
    """True with probability p."""
    _check_probability("bernoulli", p)
    return _tensor(_draw(stream.random, shape, xp.float32) < p)


def dropout(x, p=0.5, stream=None, mask=None):
    """x with each element zeroed with probability p and the others divided by 1 - p.

    mask    bool, which elements stay; otherwise it is drawn from `stream`, or, without one, from the library's streams
            (see backend.random_scope), as nn.Dropout does
    Source: Srivastava et al. 2014.
    """
    _check_probability("dropout", p)
    if p == 1:
        return x * 0.0
    if mask is None:
        drawn = backend.random_rows(x.shape) if stream is None else _draw(stream.random, x.shape, xp.float32)
        mask = drawn >= p
    return x * (astype(lower(mask), x.dtype) / (1 - p))


def _check_probability(name, p):
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: p is {p}; a probability must be in [0, 1]")


def _draw(method, shape, dtype):
    dtype = xp.dtype(dtype)
    # The generators draw float32 and float64; any other dtype is cast.
    array = xp.asarray(method(shape, dtype if dtype in (xp.float32, xp.float64) else xp.float32))
    return array.astype(dtype, copy=False)


def _tensor(array):
    from ..tensor import Tensor
    return Tensor(xp.asarray(array))
