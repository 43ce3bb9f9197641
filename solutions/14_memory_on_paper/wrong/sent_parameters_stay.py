# 14.2: nobody gathers the updated parameters at stages 1 and 2
def bytes_sent(parameters, ranks, stage):
    once = 2 * parameters * (ranks - 1) / ranks
    return {"all_reduce": 2 * once if stage == 0 else 0, "reduce_scatter": once if stage else 0,
            "all_gather": once * (0, 0, 0, 2)[stage]}
