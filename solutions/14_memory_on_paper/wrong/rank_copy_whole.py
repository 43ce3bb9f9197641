# 14.1: only m and v are divided


def bytes_per_rank(parameters, ranks, stage):
    p = 2 * parameters
    g = 2 * parameters
    o = 12 * parameters
    if stage >= 1:
        o = 4 * parameters + 8 * parameters / ranks
    if stage >= 2:
        g = g / ranks
    if stage >= 3:
        p = p / ranks
    return {"parameters": p, "gradients": g, "optimizer": o}
