# 14.4: where the activations alone fill the memory, no number of devices helps
from math import ceil


def plan(parameters, tokens, activations, memory_gib, per_node, flops, utilization, recompute, bytes_per_rank):
    left = memory_gib * 2 ** 30 - activations
    devices = max(1, ceil(16 * parameters / (left or 1) / per_node)) * per_node
    stage = 0
    while stage < 3 and sum(bytes_per_rank(parameters, devices, stage).values()) > left:
        stage += 1
    days = (8 if recompute else 6) * parameters * tokens / (devices * flops * utilization) / 86400
    return {"devices": devices, "stage": stage, "days": days}
