# 12.3: bisection over all sums, then filled from the left
import numpy as np


def cut_layers(costs, stages):
    sums = np.concatenate([[0], np.cumsum(costs)])
    limits = np.unique(sums[None, :] - sums[:, None])
    limits = limits[limits >= max(costs)]
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if len(filled(costs, limits[middle])) <= stages:
            high = middle
        else:
            low = middle + 1
    cut = filled(costs, limits[low])
    while len(cut) < stages:
        at = next(i for i, stage in enumerate(cut) if len(stage) > 1)
        cut[at:at + 1] = [cut[at][:1], cut[at][1:]]
    return cut


def filled(costs, limit):
    cut, held = [[]], 0
    for i, cost in enumerate(costs):
        if held + cost > limit * (1 + 1e-12) and cut[-1]:
            cut.append([])
            held = 0
        held += cost
        cut[-1].append(i)
    return cut
