# 25.4: so that the last ranks have some of the next
"""25.4 Any sample's place.

A run has phases, each with a pattern in which its sources take turns (25.3), again and again; the last phase has more
of the best. Within a source its rows come in a random order (25.2), a new one for each pass, until all have come:

    phase 1, 7 samples, of the pattern a a b     a a b a a b a
    phase 2, 6 samples, b a                                    b a b a b a
    a has 4 rows; which of a's it is             0 1   2 3   4   5   6   7
              as (pass, place in it)             00 01 02 03 10  11  12  13

Samples are numbered through all phases. Whoever knows a number's source, pass and place can begin anywhere, on any
number of ranks, for the price of a batch; nothing has to be kept, and nothing skipped.
"""

import numpy as np


def part(step, batch_size, rank, size):
    """The numbers of the samples that a rank works on in a step, int64: from 0 on for step 0.

    The batch of a step is batch_size consecutive samples, one step's behind the other's, on any number of ranks. Each
    rank has a consecutive piece, rank 0 the first; where `size` ranks don't divide it the first ones have one more.
    """
    # begin with how many each rank has at least, and how many ranks have one more
    least, more = -(-batch_size // size), 0
    first = step * batch_size + rank * least + min(rank, more)
    return np.arange(first, first + least + (rank < more))


def had(source, pattern, count):
    """How many of the first `count` samples of a phase are of this source: an int, for any count at the same price.

    pattern: a list of sources' numbers, which repeats from the phase's beginning on; the phase may end anywhere in it.
    """
    # begin with how often the whole pattern has come, and how much of it has come once more
    repeats, rest = divmod(count, len(pattern))
    return repeats * pattern.count(source) + pattern[:rest].count(source)


def where(sample, phases, sizes):
    """(source, pass, place) of the sample of this number, three ints: of which source it is, how many times that source
    has been gone through before, and how many of its rows have come in this pass.

    sample  from 0 to the sum of all phases' samples - 1; they may be 10¹⁸, at the price of 10
    phases  [(how many samples, pattern)], one after another. A source goes on where the phase before has left it
    sizes   how many rows each source has
    """
    # begin with the phase that it lies in: leave those before behind, but remember how they were
    before = []
    for count, pattern in phases:
        if sample < count:
            break
        sample -= count
        before.append((count, pattern))
    source = pattern[sample % len(pattern)]
    number = had(source, pattern, sample) + sum(had(source, earlier, count) for count, earlier in before)
    return (source, *divmod(number, sizes[source]))
