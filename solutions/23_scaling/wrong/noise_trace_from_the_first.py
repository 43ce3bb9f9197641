# 23.2: the averages: each step's estimates are right, and what is made of them isn't
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
        self.trace = self.decay * self.trace + (1 - self.decay) * trace if self.steps else trace
        self.square = self.decay * self.square + (1 - self.decay) * square
        self.steps += 1
        return float(trace), square

    def scale(self):
        if not self.steps:
            return math.nan
        return self.trace / self.square if self.square > 0 else math.inf
