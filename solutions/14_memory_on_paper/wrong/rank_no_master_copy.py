# 14.1: the optimizer has 8 bytes per parameter here
def bytes_per_rank(parameters, ranks, stage):
    each = {"parameters": 2, "gradients": 2, "optimizer": 8}
    divided_from = {"parameters": 3, "gradients": 2, "optimizer": 1}
    return {part: parameters * each[part] / (ranks if stage >= divided_from[part] else 1) for part in each}
