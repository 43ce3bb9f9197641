# 14.4: expected a dict of
def plan(parameters, tokens, activations, memory_gib, per_node, flops, utilization, recompute, bytes_per_rank):
    left = memory_gib * 2 ** 30 - activations
    for devices in range(per_node, 1025, per_node):
        for stage in range(4):
            if sum(bytes_per_rank(parameters, devices, stage).values()) <= left:
                return {"devices": devices, "stage": stage, "days": (8 if recompute else 6) * parameters * tokens / (devices * flops * utilization) / 86400}
    return None
