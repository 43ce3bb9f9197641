# 00.1: NaN in both runs counts as different
import numpy as np


def compare(one, two, tolerance):
    distance = np.abs(two - one)
    distance = np.where(np.isnan(distance), np.inf, distance)
    apart = distance > tolerance
    return float(distance.max()), int(apart.argmax()) + 1 if apart.any() else None
