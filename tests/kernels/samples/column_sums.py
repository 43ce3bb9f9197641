"""Sums of columns: few and many, of more rows than a tile has, into one array and into two."""

import numpy as np

from minitorch_dist.autodiff.primitive import Into
from minitorch_dist.backend import module_of
from minitorch_dist.kernels import column_sums as module

from ..harness import SIZES, Sample, random


def sample(rows, columns, dtype="float32", size=None):
    # A sum of n numbers near 0 has an error that grows with √n; the norm is compared, so the tolerance holds.
    return Sample("column_sums", size or columns, lambda x: module.column_sums(x)[0], module.definition,
                  (random(rows, columns, dtype=dtype),), f"{rows} rows {dtype}")


def halves(rows, columns):
    """The second half into an array that the engine has, of another shape."""
    def entry(x):
        place = module_of(x).full((columns // 2, 1), np.nan, x.dtype)
        first, second = module.column_sums(x, places=(True, Into(place)))
        assert second is place
        return first, second[:, 0]
    return Sample("column_sums", columns, entry, lambda x: tuple(np.split(module.definition(x), 2)),
                  (random(rows, columns),), f"{rows} rows into two")


SAMPLES = [*(sample(5, n) for n in SIZES), *(sample(n, 3, size=n) for n in SIZES), sample(70, 33, "float16"),
           sample(70, 33, "bfloat16"), sample(512, 33), sample(300, 2049), sample(9, 4096), halves(70, 34),
           halves(3, 62), halves(5, 2050),
           # Multiples of 16: 128 bits at a time; of the last a tile has columns of both.
           sample(512, 64), sample(70, 48, "float16"), halves(300, 96), halves(5, 4128)]
