# 25.4: a phase is taken off at each call
import numpy as np


def part(step, batch_size, rank, size):
    least, more = divmod(batch_size, size)
    first = step * batch_size + rank * least + min(rank, more)
    return np.arange(first, first + least + (rank < more))


def had(source, pattern, count):
    repeats, rest = divmod(count, len(pattern))
    return repeats * pattern.count(source) + pattern[:rest].count(source)


def where(sample, phases, sizes):
    (count, pattern), *later = phases
    if sample >= count:
        source, passes, place = where(sample - count, later, sizes)
        number = passes * sizes[source] + place + had(source, pattern, count)
    else:
        source = pattern[sample % len(pattern)]
        number = had(source, pattern, sample)
    return [source, number // sizes[source], number % sizes[source]]
