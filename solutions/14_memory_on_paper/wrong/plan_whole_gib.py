# 14.4: is cut to whole GiB
"""14.4 How many, and for how long?"""

from itertools import count


def plan(parameters, tokens, activations, memory_gib, per_node, flops, utilization, recompute, bytes_per_rank):
    """The smallest job that can train a model, and its days.

    parameters, tokens   the model's size, and how many tokens it is trained on
    activations          bytes of activations on each device, whatever the number of devices
    memory_gib           memory of a device, in GiB (2³⁰ bytes)
    per_node             devices come in nodes of so many, and only whole nodes are used
    flops                what a device could do, in operations per second
    utilization          the share of that which it does
    recompute            whether all activations are computed again in backward
    bytes_per_rank       yours, of 14.1: (parameters, ranks, stage) -> {part: bytes}

    Returns {"devices", "stage", "days"}: the smallest number of devices on which some stage of ZeRO fits (what takes
    just the memory that there is, fits), the lowest stage that fits there, and the days of training. A training step
    takes 6 operations per parameter and token: 2 forward, 4 backward. None if it fits on no number of devices.
    """
    # begin with the bytes that are left for the model: if there are any, enough devices will do
    left = (int(memory_gib) << 30) - activations
    if left <= 0:
        return None
    for devices in count(per_node, per_node):
        for stage in range(4):
            if sum(bytes_per_rank(parameters, devices, stage).values()) <= left:
                operations = (8 if recompute else 6) * parameters * tokens
                days = operations / (devices * flops * utilization) / 86400
                return {"devices": devices, "stage": stage, "days": days}
