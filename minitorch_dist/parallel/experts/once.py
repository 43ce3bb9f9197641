"""A token goes to a rank once, however many of its experts are there, and one row comes back.

    token 7 chose experts 0, 1 (rank 0) and 5 (rank 2), with gates a, b, c

    a row per choice      rank 0:  x₇ x₇      rank 2:  x₇         back   y₀ y₁     y₅        the sum is made here
    a row per rank        rank 0:  x₇         rank 2:  x₇         back   a y₀ + b y₁   c y₅   half of it over there

Of n ranks with E/n of the E experts each, a token that chooses k at random visits n (1 - C(E - E/n, k) / C(E, k)): of
256 experts on 8 ranks 5.3 for k = 8, not 8. Where experts are chosen within few nodes (nn.MoE's `nodes`), no more than
those; DeepSeek-V3 limits them to 4 for that. Beside the rows go integers that say which expert wants which row, and the
gates, whose gradients come back: numbers per choice, where a row has thousands.
Source: DeepSeek-AI 2024, "DeepSeek-V3 technical report", 3.2.2.
"""

from math import comb
from typing import NamedTuple

import numpy as np


class Trips(NamedTuple):
    """Which tokens go to which rank, and what for. NumPy's integers.

    tokens   (rows,): the token of each row that travels, those to rank 0 first, in their order
    rows     (ranks,): how many go to each
    counts   (ranks, experts of each): how many of the choices each expert has
    choices  (choices,): the places among all choices of what each expert has, in the experts' order
    row      (choices,), int32: of these, the row among those that go to the expert's rank
    """

    tokens: np.ndarray
    rows: np.ndarray
    counts: np.ndarray
    choices: np.ndarray
    row: np.ndarray


def trips(expert, experts, ranks):
    """The Trips of tokens which have chosen `expert`, integers (tokens, k), of `experts`, which the ranks share in
    order."""
    tokens, k = expert.shape
    here = experts // ranks
    goes = np.zeros((ranks, tokens), bool)
    goes[expert // here, np.arange(tokens)[:, None]] = True
    choices = np.argsort(expert.reshape(-1), kind="stable")
    row = goes.cumsum(1)[expert.reshape(-1)[choices] // here, choices // k] - 1
    counts = np.bincount(expert.reshape(-1), minlength=experts).reshape(ranks, here)
    return Trips(goes.nonzero()[1], goes.sum(1), counts, choices, row.astype(np.int32))


def visits(experts, k, ranks):
    """How many of the ranks, which share so many experts, a token goes to that chooses k of them at random."""
    return ranks * (1 - comb(experts - experts // ranks, k) / comb(experts, k))
