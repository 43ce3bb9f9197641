"""What a model weighs, on how many devices it fits and how long it trains there: rightly and with known mistakes."""

import math
from itertools import count

STAGES = range(4)


def results(values):
    return {"result": values}


# ---------------------------------------------------------------- 14.1

ARRAYS = [("parameters", 2, 3), ("gradients", 2, 2),                                # name, bytes, divided from stage
          ("optimizer", 4, 1), ("optimizer", 4, 1), ("optimizer", 4, 1)]            # master copy, m, v


def weigh(case, arrays=ARRAYS, shares=lambda n, ranks: n / ranks):
    """The right bytes, array by array."""
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0)
    for name, size, divided_from in arrays:
        n = case["parameters"]
        found[name] += size * (shares(n, case["ranks"]) if case["stage"] >= divided_from else n)
    return results(found)


def changed(**stages):
    """ARRAYS with other stages from which on something is divided."""
    return [(name, size, stages.get(name, stage)) for name, size, stage in ARRAYS]


def without(n):
    return [*ARRAYS[:2], *ARRAYS[2:5 - n]]


# ---------------------------------------------------------------- 14.4

def total(parameters, devices, stage):
    return sum(weigh({"parameters": parameters, "ranks": devices, "stage": stage})["result"].values())


def fits(case, devices, stage, gib=2 ** 30, taken=None):
    taken = case["activations"] if taken is None else taken
    return total(case["parameters"], devices, stage) <= case["memory_gib"] * gib - taken


def training_days(case, devices, operations=None, used=None):
    operations = (8 if case["recompute"] else 6) if operations is None else operations
    used = case["utilization"] if used is None else used
    return operations * case["parameters"] * case["tokens"] / (devices * case["flops"] * used) / 86400


def planned(case, per_node=None, rounded=math.ceil, choose=min, **memory):
    """The right plan: the number of nodes by division, as stage 3 needs least; keywords are mistakes."""
    per_node = case["per_node"] if per_node is None else per_node
    left = case["memory_gib"] * memory.get("gib", 2 ** 30) - memory.get("taken", case["activations"])
    if left <= 0:
        return results(None)
    devices = max(1, rounded(16 * case["parameters"] / (left * per_node))) * per_node
    good = [stage for stage in STAGES if fits(case, devices, stage, **memory)] or [3]
    return results({"devices": devices, "stage": choose(good), "days": training_days(case, devices)})


def without_the_limit(case):
    """As if the activations were divided among the devices too."""
    for devices in count(case["per_node"], case["per_node"]):
        good = [s for s in STAGES if fits(case, devices, s, taken=case["activations"] / devices)]
        if good:
            return results({"devices": devices, "stage": min(good), "days": training_days(case, devices)})


def same_job(case, days):
    """The right devices and stage with other days."""
    right = planned(case)["result"]
    return results(right and right | {"days": days(case, right["devices"])})


def search(case, sizes, fit=lambda taken, left: taken <= left):
    """The first plan among so many devices: mistakes in the way of looking for it."""
    left = case["memory_gib"] * 2 ** 30 - case["activations"]
    if left <= 0:
        return results(None)
    for devices, stage in sizes(case["per_node"]):
        if fit(total(case["parameters"], devices, stage), left):
            return results({"devices": devices, "stage": stage, "days": training_days(case, devices)})


def by_nodes(per_node):
    return ((n * per_node, stage) for n in range(1, 10 ** 4) for stage in STAGES)


def by_doubling(per_node):
    return ((2 ** n * per_node, stage) for n in range(20) for stage in STAGES)


def by_stages(per_node):
    return ((n * per_node, stage) for stage in STAGES for n in range(1, 10 ** 4))
