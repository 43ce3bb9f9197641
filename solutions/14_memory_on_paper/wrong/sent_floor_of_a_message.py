# 14.2: in the size of one message


def bytes_sent(parameters, ranks, stage):
    half = 2 * parameters // ranks * (ranks - 1)
    out = {"all_reduce": 0, "reduce_scatter": 0, "all_gather": 0}
    if stage == 0:
        out["all_reduce"] = 2 * half
    elif stage in (1, 2):
        out["reduce_scatter"] = half
        out["all_gather"] = half
    else:
        out["reduce_scatter"] = half
        out["all_gather"] = 2 * half
    return out
