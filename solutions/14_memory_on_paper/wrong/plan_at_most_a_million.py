# 14.4: the search needs no end
def plan(parameters, tokens, activations, memory_gib, per_node, flops, utilization, recompute, bytes_per_rank):
    left = memory_gib * 2 ** 30 - activations
    if left <= 0:
        return None
    for devices in range(per_node, 1_000_001, per_node):
        for stage in range(4):
            if sum(bytes_per_rank(parameters, devices, stage).values()) <= left:
                operations = (8 if recompute else 6) * parameters * tokens
                days = operations / (devices * flops * utilization) / 86400
                return {"devices": devices, "stage": stage, "days": days}
