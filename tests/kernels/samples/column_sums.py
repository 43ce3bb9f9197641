"""Sums of columns: few and many, of more rows than a tile has, into one array and into several."""

import numpy as np

from minitorch_dist.autodiff.primitive import Into
from minitorch_dist.backend import module_of
from minitorch_dist.kernels import column_sums as module

from ..harness import SIZES, Sample, random


def sample(rows, columns, dtype="float32", size=None):
    # A sum of n numbers near 0 has an error that grows with √n; the norm is compared, so the tolerance holds.
    return Sample("column_sums", size or columns, lambda x: module.column_sums(x)[0], module.definition,
                  (random(rows, columns, dtype=dtype),), f"{rows} rows {dtype}")


def parts(rows, columns, number):
    """The last part into an array that the engine has, of another shape."""
    def entry(x):
        place = module_of(x).full((columns // number, 1), np.nan, x.dtype)
        *others, last = module.column_sums(x, places=(*[True] * (number - 1), Into(place)))
        assert last is place
        return *others, last[:, 0]
    return Sample("column_sums", columns, entry, lambda x: tuple(np.split(module.definition(x), number)),
                  (random(rows, columns),), f"{rows} rows into {number}")


SAMPLES = [*(sample(5, n) for n in SIZES), *(sample(n, 3, size=n) for n in SIZES), sample(70, 33, "float16"),
           sample(70, 33, "bfloat16"), sample(512, 33), sample(300, 2049), sample(9, 4096), parts(70, 34, 2),
           parts(3, 62, 2), parts(5, 2050, 2), parts(7, 15, 3), parts(70, 132, 4), sample(70, 33, "float64"),
           # Multiples of 16: 128 bits at a time; of the last a tile has columns of both.
           sample(512, 64), sample(70, 48, "float16"), parts(300, 96, 2), parts(5, 4128, 2),
           parts(300, 192, 3)]
