# 25.4: a list of numbers; the first of a piece by floors of fractions of the ranks that have more


def part(step, batch_size, rank, size):
    least, more = divmod(batch_size, size)
    first = step * batch_size + rank * least + min(rank, more)
    return [first + i for i in range(least + 1 if rank < more else least)]


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
    number = had(source, pattern, sample)
    for count, earlier in before:
        number += had(source, earlier, count)
    return (source, *divmod(number, sizes[source]))
