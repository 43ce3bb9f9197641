# 14.2: the elements are counted, not the bytes
def bytes_sent(parameters, ranks, stage):
    once = parameters * (ranks - 1) / ranks
    return {"all_reduce": 2 * once if stage == 0 else 0, "reduce_scatter": once if stage else 0,
            "all_gather": once * (0, 1, 1, 2)[stage]}
