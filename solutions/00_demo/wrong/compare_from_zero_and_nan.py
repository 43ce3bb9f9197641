# 00.1: counted from 0
import numpy as np


def compare(one, two, tolerance):
    apart = np.abs(two - one) > tolerance
    return float(np.abs(two - one).max()), int(apart.argmax()) if apart.any() else None
