# 04.4: pull gives the cotangent of the first input alone
import numpy as np


def vjp(f, xs, linearize, transpose):
    y, program = linearize(f, xs)
    transposed = transpose(program)

    def pull(u):
        return transposed(u)[0]
    return y, pull


def grad(f, xs, linearize, transpose):
    y, pull = vjp(f, xs, linearize, transpose)
    if np.shape(y) != ():
        raise ValueError(f"a gradient is one of a single number, f gives an array of shape {np.shape(y)}")
    return pull(1.0)


def dot_test(program, transposed, rng):
    v = [rng.standard_normal(shape) for shape in program.shapes[:program.inputs]]
    u = [rng.standard_normal(program.shapes[i]) for i in program.outputs]
    forward = sum(np.sum(a * b) for a, b in zip(u, program(*v), strict=True))
    backward = sum(np.sum(a * b) for a, b in zip(transposed(*u), v, strict=True))
    largest = max(abs(forward), abs(backward))
    return float(abs(forward - backward) / largest) if largest else 0.0
