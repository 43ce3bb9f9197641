# 23.2: the averages: they begin with the first step's estimates
import math

import numpy as np


class NoiseScale:
    def __init__(self, comm, decay=0.99):
        self.comm, self.decay, self.trace, self.square, self.steps = comm, decay, 0.0, 0.0, 0

    def update(self, shards, whole):
        sums = np.zeros(3)
        for gradient, samples in shards:
            if samples:
                gradient = gradient.astype(np.float64)
                sums += 1, samples, samples * (gradient @ gradient)
        self.comm.all_reduce(sums)
        count, samples, above = sums
        if count < 2:
            return None
        trace = float(above - samples * (whole @ whole)) / (count - 1)
        square = float(whole @ whole - trace / samples)
        keep = self.decay if self.steps else 0.0
        self.trace = keep * self.trace + (1 - keep) * trace
        self.square = keep * self.square + (1 - keep) * square
        self.steps += 1
        return float(trace), square

    def scale(self):
        if not self.steps:
            return math.nan
        return self.trace / self.square if self.square > 0 else math.inf
