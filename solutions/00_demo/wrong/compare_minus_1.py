# 00.1: have no such step: None
import numpy as np


def compare(one, two, tolerance):
    distance = np.abs(two - one)
    distance = np.where(np.isnan(one) & np.isnan(two), 0.0, np.where(np.isnan(distance), np.inf, distance))
    apart = distance > tolerance
    return float(distance.max()), int(apart.argmax()) + 1 if apart.any() else -1
