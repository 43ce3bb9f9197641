# 25.4: of two phases that are equal the first one is found
import numpy as np


def part(step, batch_size, rank, size):
    return np.array_split(np.arange(step * batch_size, (step + 1) * batch_size), size)[rank]


def had(source, pattern, count):
    q, r = divmod(count, len(pattern))
    return q * pattern.count(source) + pattern[:r].count(source)


def where(sample, phases, sizes):
    for phase in phases:
        if sample < phase[0]:
            break
        sample -= phase[0]
    s = phase[1][sample % len(phase[1])]
    n = had(s, phase[1], sample) + sum(had(s, p, c) for c, p in phases[:phases.index(phase)])
    return s, n // sizes[s], n % sizes[s]
