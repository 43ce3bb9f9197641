# 18.1: rounded toward 0
import numpy as np


def limits(exponent_bits, mantissa_bits):
    bias = 2 ** (exponent_bits - 1) - 1
    return {'smallest': 2.0 ** (1 - bias - mantissa_bits), 'normal': 2.0 ** (1 - bias),
            'largest': (2 - 2.0 ** (-mantissa_bits)) * 2.0 ** bias, 'epsilon': 2.0 ** (-mantissa_bits)}


def round_to(x, exponent_bits, mantissa_bits):
    of = limits(exponent_bits, mantissa_bits)
    wide = x.astype(np.float64)
    exponent = np.frexp(np.maximum(np.abs(wide), of['normal']))[1] - 1
    gap = exponent - mantissa_bits
    bits = x.view(np.uint32) & np.uint32(0xffffffff << 23 - mantissa_bits & 0xffffffff)
    found = np.where(np.abs(wide) < of['normal'], np.ldexp(np.trunc(np.ldexp(wide, -gap)), gap), bits.view(np.float32))
    found = np.where(np.isfinite(x), found, x)
    return np.where(np.abs(found) > of['largest'], np.copysign(np.inf, x), found).astype(np.float32)
