# 14.2: only stage 0 all-reduces
def bytes_sent(parameters, ranks, stage):
    once = 2 * parameters * (ranks - 1) / ranks
    return {"all_reduce": 2 * once if stage in (0, 3) else 0,
            "reduce_scatter": once if stage in (1, 2) else 0,
            "all_gather": once * (0, 1, 1, 2)[stage]}
