# 23.2: nearly right: are squares summed in float32
import math

import numpy as np


class NoiseScale:
    def __init__(self, comm, decay=0.99):
        self.comm, self.decay = comm, decay
        self.trace = self.square = 0.0

    def update(self, shards, whole):
        sums = np.zeros(3)
        for gradient, samples in shards:
            if samples:
                sums += samples * np.square(gradient).sum(), 1, samples
        self.comm.all_reduce(sums)
        squares, count, samples = sums.tolist()
        if count < 2:
            return None
        size = float(whole @ whole)
        trace = (squares - samples * size) / (count - 1)
        square = size - trace / samples
        self.trace = self.decay * self.trace + (1 - self.decay) * trace
        self.square = self.decay * self.square + (1 - self.decay) * square
        return trace, square

    def scale(self):
        if self.trace == self.square == 0:
            return math.nan
        return self.trace / self.square if self.square > 0 else math.inf
