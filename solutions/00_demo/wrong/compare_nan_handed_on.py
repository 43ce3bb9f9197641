# 00.1: ask np.isnan of both
import numpy as np


def compare(one, two, tolerance):
    apart = np.abs(two - one) > tolerance
    return float(np.abs(two - one).max()), int(apart.argmax()) + 1 if apart.any() else None
