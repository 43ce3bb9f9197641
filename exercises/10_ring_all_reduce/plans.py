"""Plans of 10.1 that all ranks have made together: the right ones, known mistakes, and what can be asked of them."""

import numpy as np


def travelled(size):
    """(sends, receives) of all ranks: each hands on in a step what arrived in the one before."""
    sends, receives = [[rank] for rank in range(size)], [[] for _ in range(size)]
    for _ in range(2 * (size - 1)):
        for rank in range(size):
            receives[rank].append(sends[rank - 1][-1])
        for rank in range(size):
            sends[rank].append(receives[rank][-1])
    return [chunks[:-1] for chunks in sends], receives


def as_lists(sends, receives):
    return {"sends": [list(map(int, chunks)) for chunks in sends],
            "receives": [list(map(int, chunks)) for chunks in receives]}


def plan(send, receive, steps=lambda size: 2 * (size - 1)):
    """Hypothesis: send(rank, step, size) and receive(rank, step, size)."""
    def of(case):
        size = case["size"]
        every = range(size), range(steps(size))
        return as_lists([[send(rank, step, size) for step in every[1]] for rank in every[0]],
                        [[receive(rank, step, size) for step in every[1]] for rank in every[0]])
    return of


def made(*mistake):
    """Signature's predicate: the plans are those of plan(*mistake), as long as they are. (Of plans that are too short
    `gives` sees only that something is missing.)"""
    def holds(case, got):
        return all(np.array_equal(mine, theirs) for mine, theirs in zip(planned(case, got), as_arrays(
            plan(*mistake)(case)), strict=True))
    return holds


def odd_one(case, got):
    """(ranks, the first rank with another number of steps than it takes, how many it has, how many it takes), or None.
    """
    right = 2 * (case["size"] - 1)
    return next(((case["size"], rank, len(chunks), right) for rank, chunks in enumerate(got["sends"])
                 if len(chunks) != right), None)


def from_the_start_again(rank, step, size):
    return (rank - step % (size - 1)) % size


def planned(case, got):
    """The plans as arrays (ranks, steps), or None if they are of unequal lengths."""
    try:
        return as_arrays(got)
    except (KeyError, ValueError, TypeError):
        return None


def as_arrays(plans):
    return np.array(plans["sends"], dtype=int), np.array(plans["receives"], dtype=int)


def in_plans(predicate):
    """Signature's predicate: predicate(sends, receives, size) holds, of plans that are arrays."""
    def holds(case, got):
        plans = planned(case, got)
        return plans is not None and plans[0].ndim == 2 and bool(predicate(*plans, case["size"]))
    return holds


def goes_on(sends, receives, size):
    return np.array_equal(sends[:, 1:], receives[:, :-1])


def what_stops(case, got):
    """In words: where plans that don't go on break off first."""
    sends, receives = planned(case, got)
    last = case["size"] - 1
    if goes_on(sends[:, :last], receives[:, :last], last):
        return "complete chunks don't reach all ranks. The second half goes round the ring as the first does"
    return "the sums stop half way"
