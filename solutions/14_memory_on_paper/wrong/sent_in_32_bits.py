# 14.2: 4 bytes for each element
def bytes_sent(parameters, ranks, stage):
    once = 4 * parameters * (ranks - 1) / ranks
    return {"all_reduce": 2 * once if stage == 0 else 0, "reduce_scatter": once if stage else 0,
            "all_gather": once * (0, 1, 1, 2)[stage]}
