# 18.1: some NaN is a number now
import numpy as np


def limits(exponent_bits, mantissa_bits):
    bias = 2 ** (exponent_bits - 1) - 1
    return {"smallest": 2.0 ** (1 - bias - mantissa_bits), "normal": 2.0 ** (1 - bias),
            "largest": (2 - 2.0 ** -mantissa_bits) * 2.0 ** bias, "epsilon": 2.0 ** -mantissa_bits}


def round_to(x, exponent_bits, mantissa_bits):
    of = limits(exponent_bits, mantissa_bits)
    if exponent_bits == 8:
        drop = 23 - mantissa_bits
        u = x.view(np.uint32).astype(np.uint64)
        u = (u + (1 << (drop - 1)) - 1 + ((u >> drop) & 1)) >> drop << drop
        return u.astype(np.uint32).view(np.float32)
    wide = x.astype(np.float64)
    exponent = np.frexp(np.maximum(np.abs(wide), of["normal"]))[1] - 1
    gap = exponent - mantissa_bits
    rounded = np.ldexp(np.rint(np.ldexp(wide, -gap)), gap)
    return np.where(np.abs(rounded) > of["largest"], np.copysign(np.inf, x), rounded).astype(np.float32)
