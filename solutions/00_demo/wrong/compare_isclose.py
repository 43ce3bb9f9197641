# 00.1: the tolerance grows with the losses
import numpy as np


def compare(one, two, tolerance):
    distance = np.abs(two - one)
    distance[np.isnan(distance)] = np.inf
    distance[np.isnan(one) & np.isnan(two)] = 0
    apart = ~np.isclose(one, two, atol=tolerance, equal_nan=True)
    return distance.max(), apart.argmax() + 1 if apart.any() else None
