"""10.4: the two costs, where they cross, and the known mistakes."""

import math

from exercises.frame import when
from exercises.frame.comparing import same, shaped


def doublings(n):
    return (n - 1).bit_length()


RING, TREE = (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n), (lambda n: 2 * doublings(n),) * 2


def seconds(case, algorithm):
    """Of an algorithm that is (messages(N), times the array that is moved(N))."""
    messages_of, moved = algorithm
    return messages_of(case["size"]) * case["alpha"] + moved(case["size"]) * case["beta"] * case["nbytes"]


def takes(name, algorithm):
    """Predicate: the function `name` gives the seconds of this algorithm, whatever the crossover is."""
    def holds(case, got):
        expected = seconds(case, algorithm)
        return same(shaped(got.get(name), expected), expected, 1e-9)
    return holds


def costs(name, algorithm):
    """Signature's predicate: `name` gives the seconds of another algorithm, and they aren't the right ones."""
    right = takes(name, {"ring_seconds": RING, "tree_seconds": TREE}[name])
    return lambda case, got: takes(name, algorithm)(case, got) and not right(case, got)


def meeting(case):
    """Where the straight lines cross, from the height and the slope of each."""
    heights, slopes = (tuple(seconds(case | more, algorithm) for algorithm in (RING, TREE))
                       for more in ({"nbytes": 0.0}, {"nbytes": 1.0, "alpha": 0.0}))
    return float((heights[0] - heights[1]) / (slopes[1] - slopes[0])) if heights[0] > heights[1] else 0.0


def per_second(case, got):
    """beta taken for bytes per second."""
    swapped = case | {"beta": 1 / case["beta"]}
    return all(takes(name, algorithm)(swapped, got) for name, algorithm in (("ring_seconds", RING),
                                                                            ("tree_seconds", TREE)))


def costs_right(case, got):
    return takes("ring_seconds", RING)(case, got) and takes("tree_seconds", TREE)(case, got)


def whole_seconds(case, got):
    """The ring's bytes in whole seconds."""
    expected = RING[0](case["size"]) * (case["alpha"] + case["beta"] * case["nbytes"] // case["size"])
    return same(shaped(got.get("ring_seconds"), expected), expected, 1e-9)


def rounded(case, got):
    return costs_right(case, got) and abs(float(got["crossover"]) - meeting(case)) <= 1 and \
        float(got["crossover"]).is_integer()


def missing(sentence, alphas, betas):
    """[Signature], one per algorithm, of costs without one of their two addends (that is times 0)."""
    return [when(sentence.format(name), costs(f"{name}_seconds", (lambda n, a=messages_of: a(n) * alphas,
                                                                  lambda n, b=moved: b(n) * betas)))
            for name, (messages_of, moved) in (("ring", RING), ("tree", TREE))]


SIGNATURES = [
    when("beta is seconds per byte, and you divide by it: seconds = beta · bytes", per_second),
    *missing("beta is missing: the {}'s messages have bytes, and pay for each of them", 1, 0),
    *missing("alpha is missing: each of the {}'s messages pays it, however short", 0, 1),
    when("the ring's messages are chunks: nbytes / N each, not nbytes",
         costs("ring_seconds", (RING[0], lambda n: 2 * (n - 1)))),
    when("that is half of the ring's way: N-1 steps to add up, and N-1 more to hand the sums round",
         costs("ring_seconds", (lambda n: n - 1, lambda n: (n - 1) / n))),
    when("the ring takes 2(N-1) steps, not 2N: after N-1 steps a chunk has been everywhere",
         costs("ring_seconds", (lambda n: 2 * n, lambda n: 2))),
    when("a chunk is an N-th of the array: on N ranks there are N chunks, not N-1, though there are N-1 steps each way",
         costs("ring_seconds", (RING[0], lambda n: 2))),
    when("// throws away what is behind the point, and these are seconds: beta * nbytes // N is 0", whole_seconds),
    when("alpha is counted once for the ring: each of its 2(N-1) steps is a message, and pays it",
         costs("ring_seconds", (lambda n: 1, RING[1]))),
    when("alpha is counted once for the tree: each of its steps is a message, and pays it",
         costs("tree_seconds", (lambda n: 1, TREE[1]))),
    when("that is half of the tree's way: the sum goes up to rank 0 and back to all",
         costs("tree_seconds", (doublings, doublings))),
    when("the tree's steps are a whole number: on 5 ranks 3 per direction, not 2.32 (log₂N is rounded up)",
         costs("tree_seconds", (lambda n: 2 * math.log2(n),) * 2)),
    when("the tree's steps are rounded down: on 5 ranks it takes 3 per direction, not 2",
         costs("tree_seconds", (lambda n: 2 * int(math.log2(n)),) * 2)),
    when("a power of two needs no rounding: on 4 ranks the tree takes 2 steps per direction, on 5 it takes 3. "
         "n.bit_length() is one more than log₂n", costs("tree_seconds", (lambda n: 2 * n.bit_length(),) * 2)),
    when("log is the natural logarithm: the number of ranks that have the sum doubles with each step, so it is log₂N",
         costs("tree_seconds", (lambda n: 2 * math.ceil(math.log(n)),) * 2)),
    when("the tree's messages are the whole array, not an N-th of it",
         costs("tree_seconds", (TREE[0], lambda n: 2 * doublings(n) / n))),
    when("the costs are right, and the crossover is rounded: it is a float", rounded),
    when("the costs are right, but not where they cross: set the two straight lines equal, and solve for nbytes",
         costs_right),
]
