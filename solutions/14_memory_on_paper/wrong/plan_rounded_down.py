# 14.4: rounded down: on that many devices it doesn't fit by a little
def plan(parameters, tokens, activations, memory_gib, per_node, flops, utilization, recompute, bytes_per_rank):
    left = memory_gib * 2 ** 30 - activations
    if left <= 0:
        return None
    devices = max(1, int(16 * parameters / left / per_node)) * per_node
    stage = 0
    while stage < 3 and sum(bytes_per_rank(parameters, devices, stage).values()) > left:
        stage += 1
    days = (8 if recompute else 6) * parameters * tokens / (devices * flops * utilization) / 86400
    return {"devices": devices, "stage": stage, "days": days}
