# 10.1: one pair after the other, NumPy's integers
import numpy as np


def table(rank, size):
    chunk = np.int64(rank)
    for _ in range(2 * (size - 1)):
        yield chunk, (chunk - 1) % size
        chunk = (chunk - 1) % size
