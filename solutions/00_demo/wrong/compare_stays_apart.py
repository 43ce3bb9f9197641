# 00.1: that is the step from which on they stay apart
import numpy as np


def compare(one, two, tolerance):
    distance = np.abs(two - one)
    distance[np.isnan(distance)] = np.inf
    distance[np.isnan(one) & np.isnan(two)] = 0
    equal = np.flatnonzero(distance <= tolerance)
    step = equal[-1] + 2 if equal.size else 1
    return distance.max(), step if step <= len(one) else None
