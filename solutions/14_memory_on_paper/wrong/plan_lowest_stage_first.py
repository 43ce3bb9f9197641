# 14.4: the lowest stage of all is taken
def plan(parameters, tokens, activations, memory_gib, per_node, flops, utilization, recompute, bytes_per_rank):
    left = memory_gib * 2 ** 30 - activations
    if left <= 0:
        return None
    for stage in range(4):
        for devices in range(per_node, 5000, per_node):
            if sum(bytes_per_rank(parameters, devices, stage).values()) <= left:
                return {"devices": devices, "stage": stage, "days": (8 if recompute else 6) * parameters * tokens / (devices * flops * utilization) / 86400}
