# 04.4: v of whole numbers, u from an interval
import numpy as np


def vjp(f, xs, linearize, transpose):
    y, program = linearize(f, xs)
    transposed = transpose(program)

    def pull(u):
        return transposed(u)
    return y, pull


def grad(f, xs, linearize, transpose):
    y, pull = vjp(f, xs, linearize, transpose)
    if np.shape(y) != ():
        raise ValueError(f"a gradient is one of a single number, f gives an array of shape {np.shape(y)}")
    return pull(1.0)


def dot_test(program, transposed, rng):
    v = [rng.integers(1, 1000, shape) for shape in program.shapes[:program.inputs]]
    u = [rng.uniform(-1, 1, program.shapes[i]) for i in program.outputs]
    forward = sum(np.sum(a * b) for a, b in zip(u, program(*v), strict=True))
    backward = sum(np.sum(a * b) for a, b in zip(transposed(*u), v, strict=True))
    largest = max(abs(forward), abs(backward))
    return float(abs(forward - backward) / largest) if largest else 0.0
