# 04.4: all arrays laid end to end
import numpy as np


def vjp(f, xs, linearize, transpose):
    y, program = linearize(f, xs)
    transposed = transpose(program)

    def pull(u):
        return transposed(u)
    return [y, pull]


def grad(f, xs, linearize, transpose):
    y, pull = vjp(f, xs, linearize, transpose)
    if np.shape(y) != ():
        raise ValueError(f"a gradient is one of a single number, f gives an array of shape {np.shape(y)}")
    return pull(np.ones(()))


def dot_test(program, transposed, rng):
    def flat(arrays):
        return np.concatenate([np.ravel(a) for a in arrays])
    u = [rng.uniform(-1, 1, program.shapes[i]) for i in program.outputs]
    v = [rng.uniform(-1, 1, program.shapes[i]) for i in range(program.inputs)]
    numbers = np.array([flat(u) @ flat(program(*v)), np.dot(flat(transposed(*u)), flat(v))])
    scale = np.abs(numbers).max()
    if scale == 0:
        return 0.0
    return float(np.ptp(numbers / scale))
