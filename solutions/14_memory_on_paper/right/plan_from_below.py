# 14.4: begins near the answer, at stage 3
import math


def plan(parameters, tokens, activations, memory_gib, per_node, flops, utilization, recompute, bytes_per_rank):
    room = memory_gib * 1024 ** 3 - activations
    if not room > 0:
        return None
    nodes = max(1, math.floor(16 * parameters / room / per_node) - 1)

    def stages(n):
        return [s for s in (0, 1, 2, 3) if math.fsum(bytes_per_rank(parameters, n * per_node, s).values()) <= room]

    while not stages(nodes):
        nodes += 1
    seconds = parameters * tokens * (6 + 2 * bool(recompute)) / (flops * utilization) / (nodes * per_node)
    return {"devices": nodes * per_node, "stage": stages(nodes)[0], "days": seconds / (24 * 60 * 60)}
