"""Products of raw arrays; arithmetic of floats of 16 bits in float32, on the host and where CuPy has none."""

import numpy as xp

from .devices import ARRAY_TYPES, DEVICE_ARRAYS, Placeholder, check_devices, is_array
from .dtypes import is_bfloat16, is_floating, is_short, result_type
from .graphs import recording
from .halves import FLOAT16, to_float32, to_half


def matmul(x, y, out=None):
    """x @ y of raw arrays of two axes or more."""
    if x.__class__ is not xp.ndarray:
        if recording.graph is not None:
            return recording.graph.matmul(x, y, out)
        module = DEVICE_ARRAYS.get(x.__class__)
        # CuPy would give cuBLAS another GPU's address, which ends all work on this.
        if module is None or y.__class__ is not x.__class__ or not (
                x.data.device_id == y.data.device_id == module.cuda.runtime.getDevice()):
            check_devices("matmul", (x, y))
        if x.itemsize == 2 and x.ndim + y.ndim > 4 and is_half(x):
            return _matmul_in_float32(x, y, out)
        if module is not None:              # NumPy would find it, too, in twice the time
            return module.matmul(x, y, out=out)
    elif x.itemsize == 2 and is_half(x) or y.itemsize == 2 and is_half(y):
        return _matmul_in_float32(x, y, out)
    return xp.matmul(x, y, out=out)


def _matmul_in_float32(x, y, out):
    if not (is_floating(x.dtype) and is_floating(y.dtype)):     # beside int16, say, NumPy promotes to float32
        x, y = (a.astype(result_type(x, y)) for a in (x, y))
    product = in_float32(xp.matmul, x, y)
    if out is None:
        return product
    out[...] = product
    return out


def products_made_by():
    """What the last bits of products depend on, on this host: "numpy 2.4.6, openblas 0.3.31 for Haswell"."""
    from threadpoolctl import threadpool_info
    found = [f"numpy {xp.__version__}"]
    for pool in threadpool_info():
        if pool["user_api"] == "blas":      # which OpenBLAS chooses by the processor, or by OPENBLAS_CORETYPE
            kernels = f" for {pool['architecture']}" if pool.get("architecture") else ""
            found.append(f"{pool['internal_api']} {pool['version'] or '?'}{kernels}")
    return ", ".join(dict.fromkeys(found))


# ---------------------------------------------------------------- floats of 16 bits

def is_half(array):
    """Whether what is computed of this array is to be computed in float32: floats of 16 bits on the host, and bfloat16
    on a GPU.

    CuPy 14.2 multiplies matrices of bfloat16 (two axes, by cuBLAS) and has it in elementwise ops and reductions. It
    fails at stacks of matrices (mended by its pull request 10317), and sorts, scans and adds at indices by kernels that
    know the other dtypes alone (its issue 9630): these ask here.
    """
    dtype = array.dtype
    return (dtype == FLOAT16 and isinstance(array, ARRAY_TYPES)
            or is_bfloat16(dtype) and not isinstance(array, Placeholder))


def in_float32(function, *args):
    """function(*args), computed in float32 and rounded once: floats of 16 bits among the arguments are widened, and if
    there are no others, and all are of one dtype, float32 results are rounded to it. Arguments and results may be
    tuples.

    Processors add up products of 16 bits in 32, and so do GPUs. NumPy rounds after each addition, and takes 90 times
    as long for a product of matrices as BLAS does in float32.
    """
    floats = {a.dtype for a in _leaves(args) if getattr(a, "dtype", None) is not None and is_floating(a.dtype)}
    out = function(*_each(args, is_short, to_float32))
    if len(floats) == 1 and is_short(dtype := floats.pop()):
        return _each(out, lambda given: given == xp.float32, lambda x: to_half(x, dtype))
    return out


def add_up(x, axis=None, keepdims=False, out=None):
    """x.sum(axis, keepdims=keepdims, out=out) of a raw array; floats of 16 bits are added up in float32, rounded once.

    CuPy gives sums of float16 over all axes, or over those that lie next to each other in memory, to CUB, which adds up
    in float16 (cupy/cuda/cupy_cub.cu) unless another dtype is asked for.
    """
    if x.itemsize == 2 and adds_in_float32(x):
        total = to_half(x.sum(axis=axis, keepdims=keepdims, dtype=xp.float32), x.dtype)
        if out is None:
            return total
        out[...] = total
        return out
    return x.sum(axis=axis, keepdims=keepdims, out=out)


def adds_in_float32(x):
    """Whether sums of this array's elements are made in float32: floats of 16 bits, on any device."""
    return is_short(x.dtype) and not isinstance(x, Placeholder)


def _leaves(tree):
    for part in tree:
        if part.__class__ is tuple:
            yield from _leaves(part)
        else:
            yield part


def _each(tree, test, function):
    """The tree with function(x) in the place of each array x whose dtype passes the test."""
    if tree.__class__ is tuple:
        return tuple(_each(part, test, function) for part in tree)
    there = isinstance(tree, ARRAY_TYPES) or is_array(tree)
    return function(tree) if there and test(tree.dtype) else tree
