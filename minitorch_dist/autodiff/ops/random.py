"""Random numbers from explicit streams (generators of backend.stream): constants for differentiation.

The same stream in the same state gives the same numbers, on every device: they are drawn on the host and moved. Only
dropout by the library's own streams makes them on a GPU, the same ones (kernels/dropout.py). There is no hidden stream.
"""

from ... import backend, kernels
from ...backend import as_dtype, weak, xp
from ..primitive import LinearOp, Primitive, bind, lower
from .elementwise import astype


def uniform(stream, shape, low=0.0, high=1.0, dtype=xp.float32, device="cpu"):
    """Numbers from [low, high)."""
    return _tensor(_draw("uniform", stream, shape, dtype, lambda u: u * (high - low) + low), device)


def normal(stream, shape, mean=0.0, std=1.0, dtype=xp.float32, device="cpu"):
    """Numbers of the normal distribution."""
    return _tensor(_draw("normal", stream, shape, dtype, lambda z: z * std + mean), device)


def bernoulli(stream, shape, p=0.5, device="cpu"):
    """True with probability p."""
    _check_probability("bernoulli", p)
    return _tensor(_draw("bernoulli", stream, shape, xp.float32) < p, device)


def _thin_out(x, p, draws):
    return kernels.load("dropout").dropout_of_draws(x, p, draws)


# Linear in x and its own transpose. Nothing is kept but the keys.
_thinned = LinearOp("thinned", *[lambda x, residual: bind(_dropout, (x,), residual)] * 2, listed=False)
_dropout = Primitive("dropout", _thin_out, "x", "p draws", x=(_thinned, "p draws"), listed=False)


def made_on_device(raw):
    """Whether a kernel makes the library's own random numbers for dropout where they are used."""
    return backend.is_array(raw) and kernels.usable(raw) and raw.dtype.name in ("float32", "float16", "bfloat16")


def dropout(x, p=0.5, stream=None, mask=None):
    """x with each element zeroed with probability p and the others divided by 1 - p.

    mask    bool, which elements stay; otherwise it is drawn from `stream`, or, without one, from the library's streams
            (see backend.random_scope), as nn.Dropout does
    TypeError for a mask that isn't of bools, and a stream that is no generator. Source: Srivastava et al. 2014.
    """
    _check_probability("dropout", p)
    if p == 1:
        return x * 0.0
    if p == 0 and mask is None and stream is None:
        return x * 1.0
    if mask is None and stream is None and made_on_device(lower(x)):
        return bind(_dropout, (x,), (p, backend.random_draws(x.shape)))
    if mask is None:
        mask = (backend.random_rows(x.shape, lower(x)) if stream is None
                else backend.to_device_of(_draw("dropout", stream, x.shape, xp.float32), lower(x))) >= p
    mask = backend.to_device_of(xp.asarray(mask), lower(x)) if isinstance(mask, (list, tuple)) else lower(mask)
    dtype = getattr(mask, "dtype", None)
    if dtype is None or dtype.kind != "b":
        raise TypeError(f"dropout: mask {repr(mask) if dtype is None else f'of dtype {dtype}'}; it must be an array of "
                        "bools, True where an element stays")
    return x * (astype(mask, x.dtype) / weak(float(1 - p), x))


def _check_probability(name, p):
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: p is {p}; a probability must be in [0, 1]")


def _draw(name, stream, shape, dtype, moved=lambda x: x):
    if not isinstance(stream, xp.random.Generator):
        raise TypeError(f"{name}: stream={stream!r}; it must be a generator: mt.backend.stream(\"{name}\", seed)")
    dtype, method = as_dtype(dtype), stream.standard_normal if name == "normal" else stream.random
    # The generators draw float32 and float64; any other dtype is cast.
    array = moved(xp.asarray(method(shape, dtype if dtype in (xp.float32, xp.float64) else xp.float32)))
    return array.astype(dtype, copy=False)


def _tensor(array, device):
    from ..tensor import Tensor
    return Tensor(backend.to(xp.asarray(array), device))
