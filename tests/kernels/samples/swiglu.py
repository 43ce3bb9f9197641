"""SwiGLU, of arrays and of the halves of a matrix's rows."""

from minitorch_dist.kernels import swiglu as module

from ..harness import Sample, random


def pair(*shape, dtype="float32", scale=1):
    ct, gate, up = (random(*shape, dtype=dtype, seed=seed) for seed in (7, 1, 2))
    gate = gate if scale == 1 else gate * gate.dtype.type(scale)
    label = f"{shape} {dtype}" + ("" if scale == 1 else f" times {scale:g}")
    return [Sample("swiglu", shape[-1], module.swiglu, module.definition, (gate, up), label),
            Sample("swiglu_backward", shape[-1], module.swiglu_gradient, module.gradient, (ct, gate, up), label)]


def halves(rows, size, wanted):
    """Both in one matrix, and one cotangent of theirs alone."""
    x, ct = random(rows, 2 * size, seed=3), random(rows, size, seed=4)

    def backward(ct, x):
        return module.swiglu_gradient(ct, x[:, :size], x[:, size:], wanted)[wanted.index(True)]
    label = f"halves of ({rows}, {2 * size}) {wanted}"
    return [Sample("swiglu", size, lambda x: module.swiglu(x[:, :size], x[:, size:]),
                   lambda x: module.definition(x[:, :size], x[:, size:]), (x,), label),
            Sample("swiglu_backward", size, backward,
                   lambda ct, x: module.gradient(ct, x[:, :size], x[:, size:])[wanted.index(True)], (ct, x), label)]


SAMPLES = [
    *pair(7, 1), *pair(31), *pair(3, 5, 31), *pair(6, 1025), *pair(9, 33, dtype="float16"),
    *pair(9, 33, dtype="bfloat16"), *pair(5, 33, scale=40.0), *halves(7, 31, (True, False)),
    *halves(5, 300, (False, True)),
    # Multiples of 16: 128 bits at a time.
    *pair(70, 64), *pair(9, 48, dtype="bfloat16"), *halves(6, 32, (True, False)),
]
