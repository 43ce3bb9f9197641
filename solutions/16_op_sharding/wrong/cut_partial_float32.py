# 16.1: right, but of float64 something of float32 is made
import numpy as np


def cut(x, placement, size):
    if placement == "R":
        return [x] * size
    if placement == "P":
        return [x] + [np.zeros(x.shape, np.float32)] * (size - 1)
    axis = int(placement[1:])
    return np.split(x, [x.shape[axis] * rank // size for rank in range(1, size)], axis)


def join(parts, placement):
    if placement == "R":
        return parts[0]
    return sum(parts) if placement == "P" else np.concatenate(parts, int(placement[1:]))


def product(x, w):
    return {("R", "R"): "R", ("S0", "R"): "S0", ("R", "S1"): "S1", ("S1", "S0"): "P",
            ("P", "R"): "P", ("R", "P"): "P"}.get((x, w))


def move(have, want, nbytes, size):
    if have == want:
        return "nothing", 0
    if have == "R":
        return "slice", 0
    others = nbytes * (size - 1) / size
    if have == "P":
        return ("all_reduce", 2 * others) if want == "R" else ("reduce_scatter", others)
    return ("all_gather", others) if want == "R" else ("all_to_all", others / size)
