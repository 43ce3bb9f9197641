# 25.4: the pieces follow each other, but others have one more
import numpy as np


def part(step, batch_size, rank, size):
    edges = np.linspace(0, batch_size, size + 1).round().astype(int)
    return np.arange(step * batch_size + edges[rank], step * batch_size + edges[rank + 1])


def had(source, pattern, count):
    q, r = divmod(count, len(pattern))
    return q * pattern.count(source) + pattern[:r].count(source)


def where(sample, phases, sizes):
    before = []
    for count, pattern in phases:
        if sample < count:
            break
        sample -= count
        before.append((count, pattern))
    s = pattern[sample % len(pattern)]
    n = had(s, pattern, sample) + sum(had(s, p, c) for c, p in before)
    return s, n // sizes[s], n % sizes[s]
