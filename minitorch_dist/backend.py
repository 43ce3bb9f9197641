"""Arrays, their devices, and the seeded random streams.

`xp` is NumPy. Its ufuncs and functions carry themselves to CuPy when an
argument is a CuPy array (NEP 13 and NEP 18), so an op is written once. Only a
function that makes an array out of nothing must ask `module_of(x)` where.
"""

import hashlib

import numpy as xp

ARRAY_TYPES = (xp.ndarray, xp.generic)   # a NumPy reduction over all axes gives a scalar (np.generic), not an array


def module_of(array):
    """The module, numpy or cupy, that the array comes from."""
    if isinstance(array, ARRAY_TYPES):
        return xp
    import cupy
    return cupy.get_array_module(array)


def zeros_like(array, shape=None, dtype=None):
    """Zeros of the given shape and dtype (default: the array's own) on the array's device."""
    return module_of(array).zeros(array.shape if shape is None else shape, dtype or array.dtype)


def byte_range(array):
    """(first, last+1) address that the array's elements touch; None for scalars and empty arrays."""
    if not hasattr(array, "strides") or isinstance(array, xp.generic) or array.size == 0:
        return None
    if isinstance(array, xp.ndarray):
        return xp.lib.array_utils.byte_bounds(array)
    first = last = array.data.ptr
    for extent, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            first += (extent - 1) * stride
        else:
            last += (extent - 1) * stride
    return first, last + array.itemsize


# ---------------------------------------------------------------- random streams

def stream(*key):
    """A np.random.Generator that depends on the key alone: stream("shuffle", seed, epoch).

    The key (strings and integers) is hashed into the 128-bit key of a Philox
    counter generator, so that equal keys give equal numbers in any process, in
    any order, and different keys give independent streams. Making one costs
    about 30 µs. Source: Salmon et al. 2011, "Parallel random numbers: as easy
    as 1, 2, 3".
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return xp.random.Generator(xp.random.Philox(key=int.from_bytes(digest, "little")))
