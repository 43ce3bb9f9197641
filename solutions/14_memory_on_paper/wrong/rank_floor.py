# 14.1: the division loses the remainder
def bytes_per_rank(parameters, ranks, stage):
    each = {"parameters": 2, "gradients": 2, "optimizer": 12}
    divided_from = {"parameters": 3, "gradients": 2, "optimizer": 1}
    return {part: parameters // (ranks if stage >= divided_from[part] else 1) * each[part] for part in each}
