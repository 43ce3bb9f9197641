# 14.4: bisection over nodes, NumPy's numbers
import numpy as np


def plan(parameters, tokens, activations, memory_gib, per_node, flops, utilization, recompute, bytes_per_rank):
    available = memory_gib * 2.0 ** 30 - activations
    if available <= 0:
        return None

    def fits(devices, stage):
        return sum(bytes_per_rank(parameters, int(devices), stage).values()) <= available

    high = 1
    while not fits(high * per_node, 3):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * per_node, 3) else (middle, high)
    devices = high * per_node
    stage = np.argmax([fits(devices, s) for s in range(4)])
    days = (8.0 if recompute else 6.0) * parameters * tokens / devices / flops / utilization / 86400
    return {"days": np.float64(days), "devices": np.int64(devices), "stage": stage}
