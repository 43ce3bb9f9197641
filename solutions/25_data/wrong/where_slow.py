# 25.4: no answer within
import numpy as np


def part(step, batch_size, rank, size):
    least, more = divmod(batch_size, size)
    first = step * batch_size + rank * least + min(rank, more)
    return np.arange(first, first + least + (rank < more))


def had(source, pattern, count):
    repeats, rest = divmod(count, len(pattern))
    return repeats * pattern.count(source) + pattern[:rest].count(source)


def where(sample, phases, sizes):
    numbers, at = [0] * len(sizes), 0
    for count, pattern in phases:
        for i in range(count):
            source = pattern[i % len(pattern)]
            if at == sample:
                return (source, *divmod(numbers[source], sizes[source]))
            numbers[source] += 1
            at += 1
