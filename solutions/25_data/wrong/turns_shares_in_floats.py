# 25.3: A whole sample exactly
"""25.3 Sources that take turns.

A run trains on several sources, of 12 samples 8 from the web, 3 of code, 1 from a book. If dice decide, a batch has now
too much of the one, now of the other, and loss curves show the dice. If they take turns, evenly, it never has:

    web 8, code 3, book 1       w w c w w c w w c w w b

After k samples a source's share is k · weight / sum of all weights. It isn't whole; nearest to even is an order in
which at any time each source has had its share, but for less than one sample.
"""


def turns(weights):
    """The order in which sources take turns: a list of their numbers, 0 to len(weights) - 1, sum(weights) long.

    weights: whole numbers, 0 or more, not all 0. In the list source i stands weights[i] times. And for each k from 1 to
    sum(weights): of the first k places it has k · weights[i] / sum(weights), but for less than 1, more or less. Any
    such order is right, but it must be the same at each call: each rank makes its own.
    """
    # begin with one source's next turn. It may come too early: before which place would it be a whole sample ahead? It
    # may come too late: at which place at last, so that it isn't a whole sample behind? Of those for whom it isn't too
    # early whoever can wait least goes first. No float: k · weight against a multiple of the sum
    total = sum(weights)
    had, order = [0] * len(weights), []
    for k in range(1, total + 1):
        ready = [i for i, weight in enumerate(weights) if had[i] < k * (weight / total)]
        # Without this turn a source is a whole sample behind when (had + 1) · total ≤ place · weight.
        source = min(ready, key=lambda i: -(-(had[i] + 1) * total // weights[i]))
        had[source] += 1
        order.append(source)
    return order
