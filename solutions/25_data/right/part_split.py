# 25.4: all ranks' pieces, of which one is taken; each place of the pattern is counted
import numpy as np


def part(step, batch_size, rank, size):
    return np.array_split(step * batch_size + np.arange(batch_size), size)[rank]


def had(source, pattern, count):
    return sum((count - at + len(pattern) - 1) // len(pattern) for at, other in enumerate(pattern)
               if other == source and at < count)


def where(sample, phases, sizes):
    before = []
    for count, pattern in phases:
        if sample < count:
            break
        sample -= count
        before.append((count, pattern))
    source = pattern[sample % len(pattern)]
    number = had(source, pattern, sample) + sum(had(source, earlier, count) for count, earlier in before)
    return (source, *divmod(number, sizes[source]))
