"""Integers of every dtype, all in range, one outside at each end of the extent, and one number let through."""

import numpy as np

from minitorch_dist.kernels import outside as module

from ..harness import Sample


def sample(n, dtype="int64", low=0, high=100, other=None, put=(), label=""):
    """put: {place: value} over numbers in range. (What is compared is subtracted: as numbers.)"""
    numbers = np.random.default_rng(n).integers(max(low, 0), min(high, 100), n).astype(dtype)
    for place, value in dict(put).items():
        numbers[place] = value
    entry, definition = (lambda *args, f=f: f(*args).astype(np.uint8) for f in (module.outside, module.definition))
    return Sample("outside", n, entry, definition, (numbers, low, high, other),
                  label or f"{dtype} {low} {high} {other} {put}")


SAMPLES = [*(sample(n, put=put) for n in (1, 31, 1025, 2048, 5000) for put in ((), ((0, -1),), ((n - 1, 100),))),
           *(sample(31, dtype, put=((30, np.iinfo(dtype).max),)) for dtype in (
               "int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64")),
           # What a padded label means, beside an index from the end, and where it can't be meant.
           *(sample(31, other=-100, put=put) for put in (((3, -100),), ((3, -100), (4, -99)))),
           sample(31, low=-100, put=((3, -100),)), sample(31, low=-100, put=((3, -101),)),
           sample(31, other=2 ** 40, put=((3, 2 ** 40),)), sample(31, "uint8", other=-100, put=((3, 156),)),
           sample(31, "uint64", low=-100, other=-1, put=((3, 2 ** 64 - 1),)), sample(31, high=2 ** 40)]
