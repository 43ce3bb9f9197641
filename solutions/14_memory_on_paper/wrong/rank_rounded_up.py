# 14.1: rounded to whole bytes


def bytes_per_rank(parameters, ranks, stage):
    p = 2 * parameters
    g = 2 * parameters
    o = 12 * parameters
    if stage >= 1:
        o = -(-o // ranks)
    if stage >= 2:
        g = -(-g // ranks)
    if stage >= 3:
        p = -(-p // ranks)
    return {"parameters": p, "gradients": g, "optimizer": o}
