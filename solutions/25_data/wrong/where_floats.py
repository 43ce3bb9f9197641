# 25.4: a / b is a float, with 16 digits
import numpy as np


def part(step, batch_size, rank, size):
    least, more = divmod(batch_size, size)
    first = step * batch_size + rank * least + min(rank, more)
    return np.arange(first, first + least + (rank < more))


def had(source, pattern, count):
    repeats, rest = divmod(count, len(pattern))
    return repeats * pattern.count(source) + pattern[:rest].count(source)


def where(sample, phases, sizes):
    before = []
    for count, pattern in phases:
        if sample < count:
            break
        sample -= count
        before.append((count, pattern))
    source = pattern[sample % len(pattern)]
    number = had(source, pattern, sample) + sum(had(source, earlier, count) for count, earlier in before)
    return source, int(number / sizes[source]), int(number - int(number / sizes[source]) * sizes[source])
