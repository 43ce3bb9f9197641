# 18.1: the exponent is one too large just below powers of 2
import numpy as np


def limits(exponent_bits, mantissa_bits):
    bias = 2 ** (exponent_bits - 1) - 1
    return {'smallest': 2.0 ** (1 - bias - mantissa_bits), 'normal': 2.0 ** (1 - bias),
            'largest': (2 - 2.0 ** (-mantissa_bits)) * 2.0 ** bias, 'epsilon': 2.0 ** (-mantissa_bits)}


def round_to(x, exponent_bits, mantissa_bits):
    of = limits(exponent_bits, mantissa_bits)
    wide = x.astype(np.float64)
    exponent = np.floor(np.log2(np.maximum(np.abs(x), np.float32(of["normal"])))).astype(int)
    gap = exponent - mantissa_bits
    rounded = np.ldexp(np.rint(np.ldexp(wide, -gap)), gap)
    return np.where(np.abs(rounded) > of['largest'], np.copysign(np.inf, x), rounded).astype(np.float32)
