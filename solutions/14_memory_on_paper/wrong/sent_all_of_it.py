# 14.2: a rank sends N − 1 messages of 1/N of the data
def bytes_sent(parameters, ranks, stage):
    once = 2 * parameters
    return {"all_reduce": 2 * once if stage == 0 else 0, "reduce_scatter": once if stage else 0,
            "all_gather": once * (0, 1, 1, 2)[stage]}
