# 14.4: stage 0 is never tried
from itertools import count


def plan(parameters, tokens, activations, memory_gib, per_node, flops, utilization, recompute, bytes_per_rank):
    left = memory_gib * 2**30 - activations
    if left <= 0:
        return None
    for nodes in count(1):
        devices = nodes * per_node
        for stage in (1, 2, 3):
            if sum(bytes_per_rank(parameters, devices, stage).values()) <= left:
                ops = (8 if recompute else 6) * parameters * tokens
                return {"devices": devices, "stage": stage, "days": ops / (devices * flops * utilization) / 86400}
