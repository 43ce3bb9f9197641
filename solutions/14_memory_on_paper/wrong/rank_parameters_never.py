# 14.1: the parameters are never divided here
def bytes_per_rank(parameters, ranks, stage):
    each = {"parameters": 2, "gradients": 2, "optimizer": 4 + 4 + 4}
    divided_from = {"parameters": 4, "gradients": 2, "optimizer": 1}
    return {part: parameters * each[part] / (ranks if stage >= divided_from[part] else 1) for part in each}
