# 06.3: where an integer was asked for
import numpy as np


def peak(n, every):
    return np.floor(n / every) + every - 1


def best_every(n):
    every = min(range(1, n + 1), key=lambda length: (peak(n, length), -length))
    return every, int(peak(n, every))
