# 06.3: where an integer was asked for
import numpy as np


def peak(n, every):
    return n // every + every - 1


def best_every(n):
    every = min(np.linspace(1, n, n), key=lambda length: (peak(n, length), -length))
    return every, peak(n, every)
