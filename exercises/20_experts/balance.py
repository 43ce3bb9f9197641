"""20.2 Balance.

An expert that is chosen more often learns more, is better then, and is chosen more often still. What stops that is one
more term in the loss. With E experts and T tokens,

    f_e  the share of tokens whose first choice is e: counts, without a gradient
    P_e  the mean over tokens of e's probability, among all E experts: it has one
    loss = E · Σ_e f_e P_e           1 if all experts are used alike, E if one gets all tokens with certainty

The router's logits must stay small as well, where exp and 16 bits are good; their term is the mean over tokens of
(log Σ_e exp(logit_e))².
"""

import numpy as np


def softmax(x):
    """Along the last axis."""
    exps = np.exp(x - x.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def balance_loss(logits, first):
    """(loss, its gradient by logits).

    logits  [tokens, experts]
    first   integers [tokens]: the tokens' first choices. A router with noise doesn't always choose the greatest logit

    Without tokens the loss is 0.
    """
    raise NotImplementedError("begin with f and P, an array of E numbers each; np.bincount counts, and wants to be "
                              "told how many there are. In the loss P_e stands once, times a constant: what is the "
                              "gradient by the probability of one token?")


def z_loss(logits):
    """(loss, its gradient by logits). logits may be thousands; without tokens the loss is 0."""
    raise NotImplementedError("begin with log Σ exp, with the greatest logit subtracted before and added after. Its "
                              "gradient by the logits is an old acquaintance")
