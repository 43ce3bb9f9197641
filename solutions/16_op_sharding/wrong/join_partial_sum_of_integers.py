# 16.1: np.sum adds short integers
import numpy as np


def cut(x, placement, size):
    if placement == "R":
        return [x] * size
    if placement == "P":
        return [x] + [np.zeros_like(x) for _ in range(size - 1)]
    axis = int(placement[1:])
    n = x.shape[axis]
    return [x.take(range(n * r // size, n * (r + 1) // size), axis) for r in range(size)]


def join(parts, placement):
    if placement == "R":
        return parts[0]
    if placement == "P":
        return np.sum(parts, axis=0)
    return np.concatenate(parts, axis=int(placement[1:]))


def product(x, w):
    table = {("R", "R"): "R", ("S0", "R"): "S0", ("R", "S1"): "S1", ("S1", "S0"): "P", ("P", "R"): "P", ("R", "P"): "P"}
    return table.get((x, w))


def move(have, want, nbytes, size):
    if have == want or (have == "R" and want == "R"):
        return "nothing", 0
    share = nbytes * (size - 1) // size
    if have == "R":
        return "slice", 0
    if have == "P":
        return ("all_reduce", 2 * share) if want == "R" else ("reduce_scatter", share)
    if want == "R":
        return "all_gather", share
    return "all_to_all", share // size
