# 14.4: result['devices'] is right, but
import numpy as np


def plan(parameters, tokens, activations, memory_gib, per_node, flops, utilization, recompute, bytes_per_rank):
    left = memory_gib * 2 ** 30 - activations
    if left <= 0:
        return None
    nodes = np.ceil(16 * parameters / (left * per_node))
    for devices in [max(nodes, 1) * per_node]:
        for stage in range(4):
            if sum(bytes_per_rank(parameters, devices, stage).values()) <= left:
                operations = (8 if recompute else 6) * parameters * tokens
                days = operations / (devices * flops * utilization) / 86400
                return {"devices": devices, "stage": stage, "days": days}
