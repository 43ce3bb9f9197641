# 14.2: one message of 1/N of the data is counted
def bytes_sent(parameters, ranks, stage):
    once = 2 * parameters / ranks
    return {"all_reduce": 2 * once if stage == 0 else 0, "reduce_scatter": once if stage >= 1 else 0, "all_gather": once * (0, 1, 1, 2)[stage]}
