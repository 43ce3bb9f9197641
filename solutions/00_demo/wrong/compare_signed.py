# 00.1: the distance isn't a size
import numpy as np


def compare(one, two, tolerance):
    distance = np.maximum(two - one, np.where(np.isnan(one) | np.isnan(two), np.nan, 0))
    distance = np.where(np.isnan(one) & np.isnan(two), 0.0, np.where(np.isnan(distance), np.inf, distance))
    apart = distance > tolerance
    return float(distance.max()), int(apart.argmax()) + 1 if apart.any() else None
