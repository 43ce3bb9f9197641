# 00.1: the largest distance comes first
import numpy as np


def compare(one, two, tolerance):
    distance = np.abs(two - one)
    distance = np.where(np.isnan(one) & np.isnan(two), 0.0, np.where(np.isnan(distance), np.inf, distance))
    apart = distance > tolerance
    return int(apart.argmax()) + 1 if apart.any() else None, float(distance.max())
