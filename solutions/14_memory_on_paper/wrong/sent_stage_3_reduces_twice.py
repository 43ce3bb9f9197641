# 14.2: stage 3 reduces the gradients twice here
def bytes_sent(parameters, ranks, stage):
    once = 2 * parameters * (ranks - 1) / ranks
    return {"all_reduce": 2 * once if stage == 0 else 0, "reduce_scatter": once * (0, 1, 1, 2)[stage], "all_gather": once * (0, 1, 1, 2)[stage]}
