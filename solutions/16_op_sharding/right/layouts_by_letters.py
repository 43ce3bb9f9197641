# 16.1: tuples, one part copied, the product by which dimension is cut
import numpy as np


def bounds(n, size):
    return [(n * r // size, n * (r + 1) // size) for r in range(size)]


def cut(x, placement, size):
    if placement[0] == "S":
        axis = int(placement[1:])
        return tuple(np.moveaxis(np.moveaxis(x, axis, 0)[a:b], 0, axis) for a, b in bounds(x.shape[axis], size))
    others = x if placement == "R" else np.zeros(x.shape, x.dtype)
    return tuple(x.copy() if rank == 0 else others for rank in range(size))


def join(parts, placement):
    if placement == "P":
        return np.sum(np.stack(parts), axis=0, dtype=parts[0].dtype)
    if placement == "R":
        return parts[-1].copy()
    return np.concatenate(list(parts), axis=int(placement[1]))


def product(x, w):
    if "P" in (x, w):
        return "P" if {x, w} == {"P", "R"} else None
    cuts_k = (x == "S1") + (w == "S0")
    if cuts_k == 2:
        return "P"
    if cuts_k == 1:
        return None
    kept = [p for p in (x, w) if p != "R"]
    if len(kept) == 2:
        return None
    return kept[0] if kept else "R"


def move(have, want, nbytes, size):
    if have == want:
        return ["nothing", 0]
    chunk = np.float64(nbytes) / size
    if have == "R":
        return ["slice", np.int64(0)]
    if have == "P":
        return ["all_reduce" if want == "R" else "reduce_scatter", (1 + (want == "R")) * (size - 1) * chunk]
    if want == "R":
        return "all_gather", (size - 1) * chunk
    return "all_to_all", (size - 1) * chunk / size
