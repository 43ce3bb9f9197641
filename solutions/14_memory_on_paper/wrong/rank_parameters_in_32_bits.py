# 14.1: the parameters are counted in 32 bits
def bytes_per_rank(parameters, ranks, stage):
    each = {"parameters": 4, "gradients": 2, "optimizer": 12}
    divided_from = {"parameters": 3, "gradients": 2, "optimizer": 1}
    return {part: parameters * each[part] / (ranks if stage >= divided_from[part] else 1) for part in each}
