# 18.1: looked up in a table of the numbers from 0 to 2, an exponent at a time
import numpy as np


def limits(exponent_bits, mantissa_bits):
    powers = [2.0 ** (e - 2 ** (exponent_bits - 1) + 1) for e in range(1, 2 ** exponent_bits - 1)]
    mantissas = np.arange(2 ** mantissa_bits) / 2.0 ** mantissa_bits
    return {"smallest": powers[0] * mantissas[1], "normal": powers[0], "largest": powers[-1] * (1 + mantissas[-1]),
            "epsilon": mantissas[1]}


def round_to(x, exponent_bits, mantissa_bits):
    top, size = 2 ** (exponent_bits - 1) - 1, np.abs(x).astype(float).reshape(-1)
    table = np.arange(2 ** (mantissa_bits + 1) + 1) / 2.0 ** mantissa_bits
    middles = (table[1:] + table[:-1]) / 2
    found = size.copy()
    for e in range(1 - top, top + 1):
        here = (size >= 2.0 ** e * (e > 1 - top)) & (size < 2.0 ** (e + 1))
        low, high = (np.searchsorted(middles, size[here] / 2.0 ** e, side) for side in ("left", "right"))
        found[here] = table[np.where(low == high, low, low + low % 2)] * 2.0 ** e
    found[found >= 2.0 ** (top + 1)] = np.inf
    return np.copysign(found.reshape(x.shape), x).astype(np.float32)
