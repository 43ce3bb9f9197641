# 10.1: an array with two columns
import numpy as np


def table(rank, size):
    steps = np.arange(2 * size - 2)
    send = np.mod(rank - steps, size)
    return np.stack([send, np.roll(send, -1) if size == 2 else np.mod(send - 1, size)], axis=1)
