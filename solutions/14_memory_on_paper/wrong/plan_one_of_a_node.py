# 14.4: nodes are cut up
from itertools import chain, count


def plan(parameters, tokens, activations, memory_gib, per_node, flops, utilization, recompute, bytes_per_rank):
    left = memory_gib * 2 ** 30 - activations
    if left <= 0:
        return None
    for devices in chain([1], count(per_node, per_node)):
        for stage in range(4):
            if sum(bytes_per_rank(parameters, devices, stage).values()) <= left:
                operations = (8 if recompute else 6) * parameters * tokens
                days = operations / (devices * flops * utilization) / 86400
                return {"devices": devices, "stage": stage, "days": days}
