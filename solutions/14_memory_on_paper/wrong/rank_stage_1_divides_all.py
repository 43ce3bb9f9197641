# 14.1: stage 1 divides everything here
def bytes_per_rank(parameters, ranks, stage):
    each = {"parameters": 2, "gradients": 2, "optimizer": 12}
    return {part: parameters * size / (ranks if stage >= 1 else 1) for part, size in each.items()}
