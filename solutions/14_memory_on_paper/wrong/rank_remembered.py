# 14.1: ranks=7, stage=1
CACHE = {}


def bytes_per_rank(parameters, ranks, stage):
    each = {"parameters": 2, "gradients": 2, "optimizer": 4 + 4 + 4}
    divided_from = {"parameters": 3, "gradients": 2, "optimizer": 1}
    if (parameters, stage) not in CACHE:
        CACHE[parameters, stage] = {part: parameters * each[part] / (ranks if stage >= divided_from[part] else 1)
                                    for part in each}
    return CACHE[parameters, stage]
