# 14.1: the stages are off by one: at stage 0 nothing is divided
def bytes_per_rank(parameters, ranks, stage):
    each = {"parameters": 2, "gradients": 2, "optimizer": 12}
    divided_from = {"parameters": 3, "gradients": 2, "optimizer": 1}
    return {part: parameters * each[part] / (ranks if stage + 1 >= divided_from[part] else 1) for part in each}
