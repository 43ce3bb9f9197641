"""Floating dtypes: NumPy's own, and bfloat16.

               exponent   fraction   smallest   largest     1 + eps
    float16      5 bits    10 bits   2⁻²⁴       65,504      1.00098
    bfloat16     8          7        2⁻¹³³      3.4·10³⁸    1.0078
    float32      8         23        2⁻¹⁴⁹      3.4·10³⁸    1.00000012

bfloat16 is float32 without the last 16 bits of its fraction: the same range, of which nothing is flushed to 0, and less
than three decimal digits. NumPy has no such dtype; that of ml_dtypes, which JAX and CuPy take too, is one of kind "V"
for NumPy, and Python's floats aren't weak beside it. So whoever asks for a floating dtype asks here. ml_dtypes is
imported by the first who names bfloat16.
Source: Kalamkar et al. 2019, "A study of BFLOAT16 for deep learning training".
"""

import numpy as xp

NAME = "bfloat16"

# A dtype's name -> safetensors'.
STORED = {"bool": "BOOL", "float16": "F16", NAME: "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
          **{f"{sign}int{bits}": f"{sign.upper() or 'I'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}}


def load_bfloat16():
    """The scalar type ml_dtypes.bfloat16, which stands for its dtype as np.float32 does. ImportError without it."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"bfloat16 needs the package ml_dtypes, which can't be imported ({error}): pip install "
                          "ml_dtypes") from error
    return ml_dtypes.bfloat16


def as_dtype(dtype):
    """np.dtype(dtype), where "bfloat16" is a name too."""
    return xp.dtype(load_bfloat16() if dtype.__class__ is str and dtype == NAME else dtype)


def dtype_code(dtype):
    """A dtype as text from which as_dtype makes it again: "<f4", "bfloat16"."""
    return NAME if is_bfloat16(dtype) else dtype.str


def is_bfloat16(dtype):
    """Whether a np.dtype is bfloat16."""
    return dtype.kind == "V" and dtype.type.__name__ == NAME


def is_floating(dtype):
    """Whether a np.dtype is floating: gradients flow through such ones alone."""
    return dtype.kind == "f" or is_bfloat16(dtype)


def is_short(dtype):
    """Whether a np.dtype is a floating one of 16 bits."""
    return dtype.itemsize == 2 and is_floating(dtype)


def finfo(dtype):
    """np.finfo of any floating dtype."""
    if not is_bfloat16(dtype):
        return xp.finfo(dtype)
    from ml_dtypes import finfo
    return finfo(dtype)


def result_type(*values):
    """np.result_type of arrays, dtypes and Python's numbers: among other dtypes bfloat16 is what float16 is; the two
    together are float32."""
    dtypes = [getattr(v, "dtype", v) for v in values]
    short = [d for d in dtypes if isinstance(d, xp.dtype) and is_bfloat16(d)]
    if not short:
        return xp.result_type(*values)
    found = xp.result_type(*(xp.float16 if isinstance(d, xp.dtype) and is_bfloat16(d) else d for d in dtypes))
    if found != xp.float16:
        return found
    return xp.dtype(xp.float32) if xp.dtype(xp.float16) in dtypes else short[0]


def weak(value, beside):
    """A Python number that meets a value of bfloat16, rounded to it, as NumPy does for its own dtypes (NEP 50);
    anything else as it is."""
    dtype = getattr(beside, "dtype", None) if value.__class__ in (float, int) else None
    return value if dtype is None or not is_bfloat16(dtype) else dtype.type(float(value))


def of_one_dtype(values):
    """Arrays, lists and Python's numbers, brought to their common dtype where one is of bfloat16: NumPy finds none."""
    if not any(is_bfloat16(v.dtype) for v in values if hasattr(v, "dtype")):
        return values
    values = [xp.asarray(v) if isinstance(v, (list, tuple)) else v for v in values]
    dtype = result_type(*values)
    return [v.astype(dtype, copy=False) if hasattr(v, "dtype") else dtype.type(float(v)) for v in values]
