"""Matrix products whose sides are no multiples of a tile, transposed and sliced factors, every epilogue."""

from minitorch_dist.kernels import matmul as module

from ..harness import Sample, random


def sample(m, k, n, size, dtype="float32", bias=False, activation="none", a=None, b=None, precision="ieee", label="",
           tolerance=None):
    x, y = random(m, k, dtype=dtype), random(k, n, dtype=dtype, seed=1)
    x, y = x if a is None else a(x), y if b is None else b(y)
    w = random(n, dtype=dtype, seed=2) if bias else None
    return Sample("matmul", size, lambda *args: module.matmul(*args, activation, precision),
                  lambda *args: module.definition(*args, activation), (x, y, w),
                  f"{m} {k} {n} {dtype} {'bias ' if bias else ''}{activation} {label}".rstrip(), tolerance)


def transposed(x):
    """The same values, with the columns side by side in memory."""
    return x.T.copy().T


SAMPLES = [
    sample(1, 1, 1, 1), sample(31, 5, 7, 31), sample(1025, 3, 5, 1025), sample(3, 1025, 5, 1025),
    sample(3, 5, 1025, 1025),
    sample(65, 33, 70, 70, bias=True), sample(65, 33, 70, 70, bias=True, activation="relu"),
    sample(65, 33, 70, 70, bias=True, activation="gelu"), sample(65, 33, 70, 70, activation="gelu"),
    sample(65, 33, 70, 70, a=transposed, label="transposed a"),
    sample(65, 33, 70, 70, b=transposed, label="transposed b"),
    sample(65, 33, 70, 70, a=transposed, b=transposed, label="both transposed"),
    sample(700, 17, 150, 700, bias=True, label="several groups"),
    sample(33, 65, 31, 65, "float16", True, "relu"), sample(33, 65, 31, 65, "bfloat16", True),
    # Tensor cores take 10 bits of each factor and cut the others off: 2⁻¹⁰ at most, twice. The interpreter takes all.
    sample(33, 65, 31, 65, precision="tf32", label="tf32", tolerance=2e-3),
    # So many elements that large tiles are taken.
    sample(1537, 70, 1409, 1537, "float16", True, "relu", label="large tiles"),
    # Multiples of 16: 128 bits at a time.
    sample(128, 64, 160, 160), sample(128, 64, 160, 160, "float16", True, "gelu"), sample(64, 96, 128, 128, "bfloat16"),
    sample(128, 64, 160, 160, a=transposed, b=transposed, label="both transposed"),
    sample(128, 64, 160, 160, precision="tf32", label="tf32", tolerance=2e-3),
]
