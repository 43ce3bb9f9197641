"""18.1 Sixteen bits.

A floating-point format of 1 + E + M bits: a sign, E bits of exponent, M bits of mantissa.

    float16    1  5  10        s eeeee mmmmmmmmmm
    bfloat16   1  8   7        s eeeeeeee mmmmmmm          float32's range, a third of its digits
    E5M2       1  5   2        s eeeee mm                  8 bits

With the exponent's bits read as an integer e, and bias = 2^(E-1) - 1:

    0 < e < 2^E - 1     normal:      ± 2^(e - bias) · 1.mmmm
    e = 0               subnormal:   ± 2^(1 - bias) · 0.mmmm      the same steps as above, down to 0
    e = 2^E - 1         inf (mantissa 0) and NaN
"""

import numpy as np


def limits(exponent_bits, mantissa_bits):
    """What a format can hold, as floats: {"smallest", "normal", "largest", "epsilon"}.

    smallest  the smallest number above 0, which is subnormal
    normal    the smallest normal number
    largest   the largest finite number
    epsilon   the distance from 1 to the next larger number
    """
    # begin with float16, on paper: which e and which mantissa does each of the four have?
    bias = 2 ** (exponent_bits - 1) - 1
    return {"smallest": 2.0 ** (1 - bias - mantissa_bits), "normal": 2.0 ** (1 - bias),
            "largest": (2 - 2.0 ** -mantissa_bits) * 2.0 ** bias, "epsilon": 2.0 ** -mantissa_bits}


def round_to(x, exponent_bits, mantissa_bits):
    """x rounded to the format: the nearest number that it has, and of two equally near ones that whose last mantissa
    bit is 0.

    x  float32 array of any shape; it isn't changed. Zeros keep their signs, inf and NaN are what they were

    Returns a float32 array: all numbers of a format with E ≤ 8 and M < 23 are float32's as well. What is nearer to
    2·2^bias, the number that the format would have next, than to its largest becomes inf with x's sign; a tie, too.
    """
    # begin with the distance between neighbours of the format at x: 2^(exponent - M), where np.frexp gives the exponent
    # (mind: its fraction lies in [½, 1)), and no less than at the smallest normal number. float64 has room for it all
    of = limits(exponent_bits, mantissa_bits)
    wide = x.astype(np.float64)
    exponent = np.frexp(np.maximum(np.abs(wide), of["normal"]))[1] - 1
    gap = exponent - mantissa_bits
    rounded = np.ldexp(np.rint(np.ldexp(wide, -gap)), gap)
    return np.where(np.abs(rounded) > of["largest"], np.copysign(np.inf, x), rounded).astype(np.float32)
