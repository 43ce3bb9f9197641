"""25.3: what an order of turns must hold, and orders that people take for even."""

from fractions import Fraction

import numpy as np

from exercises.frame import demand

PICTURE = [8, 3, 1]


# ---------------------------------------------------------------- cases

def cases(rng):
    """Weights: first a few, of which each known mistake breaks the bound; then those with which the others do."""
    found = [[8, 3, 1], [7, 7, 7, 7, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 10], [5, 5, 1, 1, 1, 1, 1], [0, 4, 0, 1, 1, 0],
             [3, 3, 3, 1, 1, 3, 1, 3, 1], [17, 17, 5, 5, 5, 3, 3, 1, 1], [7], [1, 1], [6, 4], [0, 0, 3],
             [1] * 9, [2, 4, 8, 16, 32], [97, 1, 2], [30, 13, 15], [12, 12, 12, 1, 1, 1, 1, 1, 1, 1]]
    for size in (3, 4, 6, 9):
        weights = rng.integers(0, 14, size)
        weights[rng.integers(size)] += 1
        found.append(weights.tolist())
    found.append(rng.permutation([40, 33, 11, 9, 3, 2, 1, 1]).tolist())
    return [{"weights": [int(weight) for weight in each]} for each in [*found, PICTURE]]


# ---------------------------------------------------------------- how far from its share

def furthest(order, weights):
    """(by how many samples, after how many turns, which source, how many it has had then), the worst; exact."""
    total = sum(weights)
    had = np.cumsum(np.eye(len(weights), dtype=np.int64)[list(order)], 0)
    off = had * total - np.outer(np.arange(1, len(order) + 1), weights)
    k, i = np.unravel_index(np.abs(off).argmax(), off.shape)
    return Fraction(int(off[k, i]), total), int(k) + 1, int(i), int(had[k, i])


# ---------------------------------------------------------------- what people do

def blocks(weights):
    return [i for i, weight in enumerate(weights) for _ in range(weight)]


def sizes_down(weights):
    return [i for i in sorted(range(len(weights)), key=lambda i: -weights[i]) for _ in range(weights[i])]


def one_each(weights):
    """Round robin, until a source has had all its turns."""
    return [i for turn in range(max(weights)) for i, weight in enumerate(weights) if weight > turn]


def most_left(weights):
    """Who has the most turns left."""
    left, found = list(weights), []
    for _ in range(sum(weights)):
        i = max(range(len(left)), key=left.__getitem__)
        left[i] -= 1
        found.append(i)
    return found


def most_behind(weights):
    """Smooth weighted round robin."""
    late, found, total = [0] * len(weights), [], sum(weights)
    for _ in range(total):
        late = [each + weight for each, weight in zip(late, weights, strict=True)]
        i = max(range(len(late)), key=late.__getitem__)
        late[i] -= total
        found.append(i)
    return found


def by_times(offset):
    """The j-th turn of a source at the time (j + offset) / weight."""
    return lambda weights: [i for _, i in sorted((Fraction(2 * j + offset, 2 * weight), i) for i, weight in enumerate(
        weights) for j in range(weight))]


def cut(times):
    """Places at j · total / weight, moved on to the next that is free."""
    def found(weights):
        total = sum(weights)
        order = [None] * total
        for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
            for j in range(weights[i]):
                at = times(j, total, weights[i])
                while order[at % total] is not None:
                    at += 1
                order[at % total] = i
        return order
    return found


KNOWN = [     # (who, what it is)
    (blocks, "That is one source after the other: at first nothing but the first"),
    (sizes_down, "That is one source after the other: at first nothing but the largest"),
    (one_each, "That is one turn for each by turns, until it has had all: at the end only the large ones are left"),
    (most_left, "That is who has most turns left: large ones first, and small ones not before these are as small"),
    (most_behind, "That is who is furthest behind its share (smooth weighted round robin): nearly even, but of several "
                  "that are behind one may have to wait too long. Who would be the first to be a whole sample late?"),
    (by_times(0), "That is who has had the least of its weight: at the beginning, all small ones at once. A source may "
                  "be too early, too"),
    (by_times(1), "That is each source's turns in the middles of equal stretches: of many small ones all come at once"),
    (by_times(2), "That is who would be the first to be late: and who is too early must not be asked at all"),
    (cut(lambda j, total, weight: j * total // weight), "That is each source's places, evenly, moved on where one is "
                                                        "taken: small ones are pushed too far"),
]


def told(got, weights):
    """A sentence about an order that breaks the bound."""
    off, k, i, had = furthest(got, weights)
    share = Fraction(k * weights[i], sum(weights))
    said = (f"weights {weights}: after {k} turns source {i} has had {had}, and its share is {float(share):.2f}: "
            f"{float(abs(off)):.2f} samples too {'many' if off > 0 else 'few'}, where less than 1 was asked for")
    whole = "A whole sample exactly: <= for <, or a float that can't tell the two apart" if abs(off) == 1 else ""
    known = next((text for order, text in KNOWN if list(got) == order(weights)), whole)
    return f"{said}. {known}" if known else said


# ---------------------------------------------------------------- demands

def listed(case, got):
    order = got["result"]
    order = order.tolist() if isinstance(order, np.ndarray) else order
    return [int(i) for i in order] if isinstance(order, list) and all(
        isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in order) else None


def holds(predicate):
    return lambda case, got: predicate(listed(case, got), case["weights"])


def counts(order, weights):
    return np.bincount(order, minlength=len(weights)).tolist()


def of_counts(case, got):
    order, weights = listed(case, got), case["weights"]
    found = counts(order, weights)
    i = next(i for i, (a, b) in enumerate(zip(found, weights, strict=True)) if a != b)
    return (f"weights {weights}: source {i} stands in the list {found[i]} times, and its weight is {weights[i]}"
            + (". A source without weight has no turn" if not weights[i] else ". All have equally many turns"
               if len({n for n in found if n}) == 1 else ""))


DEMANDS = [
    demand("the list isn't one of whole numbers: it holds the numbers of sources, ints from 0 on",
           lambda case, got: listed(case, got) is not None),
    demand("the weights aren't what they were before the call: work on a copy", lambda case, got: not got["changed"]),
    demand(lambda case, got: f"weights {case['weights']}: the list has {len(listed(case, got))} turns, and "
           f"{sum(case['weights'])} were asked for, the sum of the weights", holds(
               lambda order, weights: len(order) == sum(weights))),
    demand(lambda case, got: f"weights {case['weights']}: there is a source {max(listed(case, got), key=abs)} in the "
                             f"list; "
           f"they are 0 to {len(case['weights']) - 1}", holds(
               lambda order, weights: 0 <= min(order) <= max(order) < len(weights))),
    demand("two calls give two orders: each rank makes its own, and they would train on other samples than they think. "
           "No dice", lambda case, got: np.array_equal(got["result"], got["again"])),
    demand(of_counts, holds(lambda order, weights: counts(order, weights) == weights)),
    demand(lambda case, got: told(listed(case, got), case["weights"]), holds(
        lambda order, weights: abs(furthest(order, weights)[0]) < 1)),
]
