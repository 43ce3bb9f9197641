# 18.1: number by number, how many gaps
import numpy as np


def limits(exponent_bits, mantissa_bits):
    top = (1 << (exponent_bits - 1)) - 1
    return {"epsilon": 1 / (1 << mantissa_bits), "normal": 0.5 ** (top - 1),
            "smallest": 0.5 ** (top - 1 + mantissa_bits),
            "largest": sum(2.0 ** (top - i) for i in range(mantissa_bits + 1))}


def round_to(x, exponent_bits, mantissa_bits):
    of, flat = limits(exponent_bits, mantissa_bits), np.atleast_1d(x).astype(np.float64).ravel()
    out = np.empty(flat.shape, np.float32)
    for i, value in enumerate(flat):
        if not np.isfinite(value) or value == 0:
            out[i] = value
            continue
        gap = of["smallest"]
        while abs(value) >= of["normal"] * 2 * gap / of["smallest"]:
            gap *= 2
        n = abs(value) / gap
        whole = int(n)
        if n - whole > 0.5 or n - whole == 0.5 and whole % 2:
            whole += 1
        size = whole * gap if whole * gap <= of["largest"] else float("inf")
        out[i] = -size if value < 0 else size
    return out.reshape(x.shape)
