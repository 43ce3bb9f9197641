# 25.4: what was found of the one is given for the other
import numpy as np

STARTS = {}


def part(step, batch_size, rank, size):
    return np.array_split(np.arange(step * batch_size, (step + 1) * batch_size), size)[rank]


def had(source, pattern, count):
    repeats, rest = divmod(count, len(pattern))
    return repeats * pattern.count(source) + pattern[:rest].count(source)


def where(sample, phases, sizes):
    counts = tuple(count for count, _ in phases)
    if counts not in STARTS:
        STARTS[counts], start, before = [], 0, [0] * len(sizes)
        for count, pattern in phases:
            STARTS[counts].append((start, start + count, pattern, before))
            start, before = start + count, [n + had(i, pattern, count) for i, n in enumerate(before)]
    for start, end, pattern, before in STARTS[counts]:
        if sample < end:
            source = pattern[(sample - start) % len(pattern)]
            return source, *divmod(before[source] + had(source, pattern, sample - start), sizes[source])
