# 25.4: tables by cumulative sums, and the phase by bisection
import bisect

import numpy as np


def part(step, batch_size, rank, size):
    bounds = [0]
    for other in range(size):
        bounds.append(bounds[-1] + batch_size // size + (other < batch_size % size))
    return step * batch_size + np.arange(bounds[rank], bounds[rank + 1])


def had(source, pattern, count):
    table = np.cumsum([0, *(other == source for other in pattern)])
    return int(table[count % len(pattern)]) + count // len(pattern) * int(table[-1])


def where(sample, phases, sizes):
    starts = [0]
    for count, _ in phases:
        starts.append(starts[-1] + count)
    number = bisect.bisect_right(starts, sample) - 1
    at, pattern = sample - starts[number], phases[number][1]
    source = pattern[at % len(pattern)]
    row = had(source, pattern, at) + sum(had(source, p, n) for n, p in phases[:number])
    return source, row // sizes[source], row % sizes[source]
