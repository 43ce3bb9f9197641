# 00.1: also where it stays within the tolerance
import numpy as np


def compare(one, two, tolerance):
    distance = np.abs(two - one)
    distance = np.where(np.isnan(one) & np.isnan(two), 0.0, np.where(np.isnan(distance), np.inf, distance))
    apart = distance > tolerance
    if not apart.any():
        return 0.0, None
    return float(distance.max()), int(apart.argmax()) + 1
