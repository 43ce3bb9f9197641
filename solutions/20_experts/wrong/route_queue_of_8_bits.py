# 20.1: are counted in 8 bits
"""20.1 The router: which expert a token goes to, which place it has there, and how much the answer counts.

Of E experts each token chooses k. An expert has a fixed number of places, its capacity, so that all shapes are known
beforehand; a choice that finds no place is dropped.

    expert  integers [tokens, k]: the chosen experts, the likeliest first
    slot    integers [tokens, k]: how many choices were before this one in that expert's queue. It has a place if this
            is less than the capacity
    gates   [tokens, k]: what the experts' answers are multiplied by, before they are added
"""

import numpy as np


def softmax(x):
    """Along the last axis; exp(-inf) is 0."""
    exps = np.exp(x - x.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def capacity_of(tokens, experts, k, factor):
    """How many places an expert has: as many as it would need if all experts were chosen alike, times the factor; the
    next integer above, if that isn't one, and never more than there are tokens."""
    # begin with the number of choices, and each expert's equal share of them
    return min(tokens, int(np.ceil(factor * k * tokens / experts)))


def probabilities(logits, expert):
    """[tokens, experts]: the softmax of logits [tokens, experts] over those experts that a token chose, 0 elsewhere.
    With one choice per token (k = 1) it is the softmax over all experts."""
    # begin with what a softmax over one chosen expert would be, and what its gradient would be: hence the second
    # sentence. For the first: a logit of -inf has the probability 0
    if expert.shape[1] == 1:
        return softmax(logits)
    chosen = np.full_like(logits, -np.inf)
    np.put_along_axis(chosen, expert, np.take_along_axis(logits, expert, 1), 1)
    return softmax(chosen)


def route(logits, k):
    """(expert, slot, gates) of logits [tokens, experts]. There may be no token at all.

    A token chooses the k experts with the greatest logits; among equal ones that with the lowest number is first. All
    tokens' first choices queue in the tokens' order, behind them all second choices, and so on. A gate is the chosen
    expert's number in `probabilities`; it doesn't depend on what is dropped later.
    """
    # begin with a sort that leaves equal ones in order. Then put all choices into one line, in the order in which they
    # queue: for each of them, how many before it have the same expert?
    tokens, experts = logits.shape
    expert = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    line = expert.T.ravel()
    until = np.cumsum(line[:, None] == np.arange(experts), axis=0, dtype=np.uint8)
    slot = until[np.arange(len(line)), line] - 1
    return expert, slot.reshape(k, tokens).T, np.take_along_axis(probabilities(logits, expert), expert, 1)


def route_backward(logits, expert, dgates):
    """The gradient by logits. expert: as route gave it; dgates [tokens, k]: the gradient by the gates.

    Which experts were chosen is a choice among integers, and has no gradient: only the gates have.
    """
    # begin with the gradient by all probabilities: 0 but for the chosen ones. Then it's softmax's, as in chapter 5
    p, dp = probabilities(logits, expert), np.zeros_like(logits)
    np.put_along_axis(dp, expert, dgates, 1)
    return p * (dp - (p * dp).sum(1, keepdims=True))


def rows_of(expert, slot, experts, capacity):
    """Integers [experts, capacity]: the number of the token that has this place; -1 where nobody has it."""
    # begin with nobody anywhere. Which choices have a place?
    rows = np.full((experts, capacity), -1)
    for token, choice in np.argwhere(slot < capacity):
        rows[expert[token, choice], slot[token, choice]] = token
    return rows
