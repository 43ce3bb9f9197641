"""Floating numbers of 8 and 4 bits, the scales that groups of them share, and what spreads a large one over its group.

    x  ≈  q · scale         q: one of a Format's numbers; scale: one for the whole group, by one of three rules
"""

import functools
from dataclasses import dataclass

from ..backend import device_of, module_of, stream, to, xp

LEAST = 1e-12       # a group without larger numbers has this one's scale: 0 would have none


@dataclass(frozen=True)
class Format:
    """Floating numbers of few bits. bits: of the fraction; least: the smallest normal number's exponent; largest."""

    name: str
    bits: int
    least: int
    largest: float

    def rounded(self, x, chance=None):
        """x, float32 or float64, as some of these numbers; beyond the largest it is that. NaN stays.

        chance  None: the nearest, halves to even. Numbers of x's shape, uniform in [0, 1): the next one up or down,
                either as probably as x is near to it, so that the mean of many is x
        """
        arrays = module_of(x)
        near = arrays.minimum(arrays.maximum(x, -self.largest), self.largest)
        step = arrays.maximum(power_below(near), 2.0 ** self.least) * 2.0 ** -self.bits
        if chance is None:
            # The processor rounds to multiples of the last bit of so large a number, which is this step.
            large = step * (1.5 * 2.0 ** xp.finfo(x.dtype).nmant)
            return arrays.copysign((near + large) - large, x)
        steps = arrays.absolute(near) / step
        below = arrays.floor(steps)
        return arrays.copysign((below + (chance < steps - below)) * step, x)


def power_below(x):
    """2^floor(log2 |x|) of float32 or float64, 0 for 0: x without its sign and fraction."""
    bits, exponent = (xp.int32, 0x7F800000) if x.dtype == xp.float32 else (xp.int64, 0x7FF0000000000000)
    return (x.view(bits) & exponent).view(x.dtype)


E4M3 = Format("e4m3", 3, -6, 448.0)
E5M2 = Format("e5m2", 2, -14, 57344.0)
E2M1 = Format("e2m1", 1, 0, 6.0)


# ---------------------------------------------------------------- scales: of each group's largest |x| and the matrix's

def float32_scale(largest, of_all, form):
    """That which makes the group's largest the format's."""
    return module_of(largest).maximum(largest, LEAST) / form.largest


def e8m0_scale(largest, of_all, form):
    """The same, rounded up to a power of two, which rounds nothing by itself: no number is cut off at the range's end.

    The 8 bits of E8M0 are an exponent from -127 to 127, which is enough: of float32 numbers it is from -55 (LEAST, of
    e5m2) to 126 (of e2m1)."""
    return 1 / power_below(form.largest / module_of(largest).maximum(largest, LEAST))


def e4m3_scale(largest, of_all, form):
    """The same, rounded to an e4m3 number times one scale of the whole matrix, with which the largest of these is 448.
    Of a group below 2⁻¹⁰ of that it is 0, and so are its numbers."""
    whole = module_of(largest).maximum(of_all, LEAST) / (E4M3.largest * form.largest)
    return E4M3.rounded(largest / form.largest / whole) * whole


SCALES = {"float32": float32_scale, "e8m0": e8m0_scale, "e4m3": e4m3_scale}


# ---------------------------------------------------------------- outliers

HADAMARD = 16
SIGNS = xp.where(stream("signs of the random Hadamard transform").random(HADAMARD) < 0.5, -1, 1)


@functools.cache
def signs(dtype, device):
    """SIGNS on a device: sent there once, and not for each product."""
    return to(SIGNS.astype(dtype), device)


def hadamard(x):
    """x (rows, n) with each 16 columns mixed by one orthogonal matrix, ¼ of a Hadamard matrix of ±1 whose rows have
    random signs, the same at all times: so a number is spread over 16, and hadamard(a) hadamard(b)ᵀ = a bᵀ. The last
    n mod 16 columns stay. Sums are made in one order on any device: by pairs, as a fast Fourier transform's are."""
    arrays, (rows, n) = module_of(x), x.shape
    blocks = n // HADAMARD
    signed = x[:, :blocks * HADAMARD].reshape(rows, blocks, HADAMARD) * signs(x.dtype, device_of(x))
    mixed = signed.reshape(rows, blocks, 2, 2, 2, 2)
    for axis in range(2, 6):
        one, other = arrays.split(mixed, 2, axis)
        mixed = arrays.concatenate([one + other, one - other], axis)
    return arrays.concatenate([mixed.reshape(rows, blocks * HADAMARD) / 4, x[:, blocks * HADAMARD:]], 1)
