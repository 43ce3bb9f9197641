# 18.1: looked up in a table of all numbers
import numpy as np


def positive(exponent_bits, mantissa_bits):
    bias = 2 ** (exponent_bits - 1) - 1
    rows = []
    for e in range(2 ** exponent_bits - 1):
        mantissas = np.arange(2 ** mantissa_bits) / 2.0 ** mantissa_bits
        rows.append((mantissas + (1 if e else 0)) * 2.0 ** ((e or 1) - bias))
    return np.concatenate([*rows, [2.0 * 2.0 ** bias]])


def limits(exponent_bits, mantissa_bits):
    table = positive(exponent_bits, mantissa_bits)
    one = np.searchsorted(table, 1.0)
    return {"smallest": table[1], "normal": table[2 ** mantissa_bits], "largest": table[-2],
            "epsilon": table[one + 1] - table[one]}


def round_to(x, exponent_bits, mantissa_bits):
    table = positive(exponent_bits, mantissa_bits)
    middles = (table[1:] + table[:-1]) / 2
    size = np.abs(x).astype(float)
    low, high = np.searchsorted(middles, size, "left"), np.searchsorted(middles, size, "right")
    index = np.where(low == high, low, low + low % 2)
    table[-1] = np.inf
    result = np.copysign(table[np.minimum(index, len(table) - 1)], x)
    result = np.where(np.isnan(x), x, result)
    return np.float32(result)
