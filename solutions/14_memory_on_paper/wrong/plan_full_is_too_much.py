# 14.4: what takes just the memory that there is, fits
def plan(parameters, tokens, activations, memory_gib, per_node, flops, utilization, recompute, bytes_per_rank):
    left = memory_gib * 2 ** 30 - activations
    if left <= 0:
        return None
    devices = per_node
    while True:
        for stage in range(4):
            if sum(bytes_per_rank(parameters, devices, stage).values()) < left:
                return {"devices": devices, "stage": stage, "days": (8 if recompute else 6) * parameters * tokens / (devices * flops * utilization) / 86400}
        devices += per_node
