# 14.1: shares set stage by stage, whole numbers where nothing is divided
import numpy as np


def bytes_per_rank(parameters, ranks, stage):
    sizes = np.array([2, 2, 12], dtype=np.int64) * parameters
    share = [1, 1, 1]
    for part in list(range(2, -1, -1))[:stage]:
        share[part] = ranks
    names = "parameters", "gradients", "optimizer"
    return {name: size if n == 1 else size / n for name, size, n in zip(names, sizes, share, strict=True)}
