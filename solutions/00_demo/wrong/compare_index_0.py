# 00.1: curves that are apart from step 1 on get None
import numpy as np


def compare(one, two, tolerance):
    distance = np.abs(two - one)
    distance[np.isnan(distance)] = np.inf
    distance[np.isnan(one) & np.isnan(two)] = 0
    apart = np.argmax(distance > tolerance)
    return distance.max(), apart + 1 if apart else None
