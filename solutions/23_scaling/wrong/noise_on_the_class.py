# 23.2: keep them on the object, not
import math

import numpy as np


class NoiseScale:
    averages = {"trace": 0.0, "square": 0.0}

    def __init__(self, comm, decay=0.99):
        self.comm, self.decay = comm, decay

    def update(self, shards, whole):
        sums = np.zeros(3)
        for gradient, samples in shards:
            if samples:
                sums += samples * np.square(gradient, dtype=np.float64).sum(), 1, samples
        self.comm.all_reduce(sums)
        squares, count, samples = sums.tolist()
        if count < 2:
            return None
        size = float(whole @ whole)
        trace = (squares - samples * size) / (count - 1)
        square = size - trace / samples
        self.averages["trace"] = self.decay * self.averages["trace"] + (1 - self.decay) * trace
        self.averages["square"] = self.decay * self.averages["square"] + (1 - self.decay) * square
        return trace, square

    def scale(self):
        if self.averages["trace"] == self.averages["square"] == 0:
            return math.nan
        return self.averages["trace"] / self.averages["square"] if self.averages["square"] > 0 else math.inf
