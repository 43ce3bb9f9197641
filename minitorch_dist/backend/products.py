"""Products of raw arrays; on the host, arithmetic of floats of 16 bits in float32."""

import numpy as xp

from .devices import ARRAY_TYPES
from .graphs import recording


def matmul(x, y, out=None):
    """x @ y of raw arrays of two axes or more."""
    if x.__class__ is not xp.ndarray:
        if recording.graph is not None:
            return recording.graph.matmul(x, y, out)
    elif x.itemsize == 2 and is_half(x):
        product = in_float32(xp.matmul, x, y)
        if out is None:
            return product
        out[...] = product
        return out
    return xp.matmul(x, y, out=out)


# ---------------------------------------------------------------- floats of 16 bits on the host

def is_half(array):
    """Whether an array of the host (or a number of NumPy's) has floats of 16 bits."""
    return array.dtype == xp.float16 and isinstance(array, ARRAY_TYPES)


def in_float32(function, *args):
    """function(*args), computed in float32 and rounded once: floats of 16 bits among the arguments are widened, and if
    there are no others, float32 results are rounded to theirs. Arguments and results may be tuples.

    Processors add up products of 16 bits in 32, and so do GPUs. NumPy rounds after each addition, and takes 90 times
    as long for a product of matrices as BLAS does in float32.
    """
    floats = {a.dtype for a in _leaves(args) if getattr(a, "dtype", None) is not None and a.dtype.kind == "f"}
    out = function(*_each(args, xp.float16, lambda x: x.astype(xp.float32)))
    return _each(out, xp.float32, to_half) if floats == {xp.dtype(xp.float16)} else out


def to_half(x):
    """x.astype(float16); what is too large becomes inf without a warning, for optim.GradScaler to see."""
    if isinstance(x, xp.ndarray) and x.ndim and x.dtype == xp.float32:
        # For each number below 2⁻¹⁴ that NumPy rounds it raises the processor's flag for that, in half a microsecond.
        # So they are rounded to multiples of 2⁻²⁴ before, which is the distance of float32's numbers around 0.75.
        small = x + xp.float32(0.75)
        small -= xp.float32(0.75)
        xp.copysign(small, x, out=small)
        xp.copyto(small, x, where=xp.absolute(x) >= 2.0 ** -14)
        x = small
    with xp.errstate(over="ignore"):
        return x.astype(xp.float16)


def _leaves(tree):
    for part in tree:
        if part.__class__ is tuple:
            yield from _leaves(part)
        else:
            yield part


def _each(tree, dtype, function):
    """The tree with function(x) in the place of each host array x of a dtype."""
    if tree.__class__ is tuple:
        return tuple(_each(part, dtype, function) for part in tree)
    return function(tree) if isinstance(tree, ARRAY_TYPES) and tree.dtype == dtype else tree
