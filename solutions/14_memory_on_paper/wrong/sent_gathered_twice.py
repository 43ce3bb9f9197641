# 14.2: stages 1 and 2 gather twice here
def bytes_sent(parameters, ranks, stage):
    once = 2 * parameters * (ranks - 1) / ranks
    return {"all_reduce": 2 * once if stage == 0 else 0,
            "reduce_scatter": once if stage >= 1 else 0,
            "all_gather": once * (0, 2, 2, 2)[stage]}
