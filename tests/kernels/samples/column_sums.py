"""Sums of columns: few and many, of more rows than a tile has."""

from minitorch_dist.kernels import column_sums as module

from ..harness import SIZES, Sample, random


def sample(rows, columns, dtype="float32", size=None):
    # A sum of n numbers near 0 has an error that grows with √n; the norm is compared, so the tolerance holds.
    return Sample("column_sums", size or columns, module.column_sums, module.definition,
                  (random(rows, columns, dtype=dtype),), f"{rows} rows {dtype}")


SAMPLES = [*(sample(5, n) for n in SIZES), *(sample(n, 3, size=n) for n in SIZES), sample(70, 33, "float16"),
           sample(70, 33, "bfloat16"), sample(512, 33)]
