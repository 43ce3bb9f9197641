"""The polynomials by which Muon's iteration comes nearest to U Vᵀ in so many steps.

    singular values   0.001 ├──────────────────────────────────────────────┤ 1
    p₁                        0.008 ├───────────────────────────────────────┤ 1.99
    p₂                               0.03 ├────────────────────────────────┤ 1.97         each p(x) = a·x + b·x³ + c·x⁵
    …                                                                                    is off from 1 as little as one
    p₅                                                     0.88 ├┤ 1.12                  can be, on all of its interval

Of all of this form the best p has its largest errors four times, by turns above and below 1: at both ends of the
interval and at two places between them. From a guess of these places come a, b, c; from them better places (Remez).
What p makes of the interval is the next one. The best p of every step is the best in all (theorem 3.1).

Source: Amsel et al. 2025, "The Polar Express: optimal matrix sign methods and their application to the Muon algorithm".
"""

import numpy as np

from ..backend import is_whole
from .settings import check_settings

ROUNDS = 100        # far more than are needed
CUSHION = 0.02407327424182761       # the authors': what their numbers are made with


def polar_express(steps=5, lowest=1e-3, cushion=CUSHION, safety=0.01):
    """((a, b, c) of each step), floats, to be Muon's ns_coefficients. ValueError for settings out of range.

    lowest   the least singular value, as a share of the matrix's norm, that is to come near 1
    cushion  as if none were below that share of the interval's end: a steeper p would lose too much to rounding
    safety   p(x / (1 + safety)): rounding may have brought x a little out of the interval
    """
    check_settings(steps=(steps, is_whole(steps) and steps >= 1, "a whole number, at least 1"),
                   lowest=(lowest, 0 < lowest < 1, "in (0, 1)"), cushion=(cushion, 0 <= cushion < 1, "in [0, 1)"),
                   safety=(safety, safety >= 0, "at least 0"))
    low, high, found = lowest, 1.0, []
    for _ in range(steps):
        p = best(max(low, cushion * high), high)
        if cushion * high > low:        # as far above 1 as below, on the whole interval
            p = p * 2 / (at(p, low) + at(p, high))
        found.append(tuple(map(float, p / (1 + safety) ** np.array([1, 3, 5]))))
        low = at(p, low)
        high = 2 - low
    return tuple(found)


def best(low, high):
    """(a, b, c) of the polynomial nearest to 1 on [low, high], 0 < low < high."""
    if low / high > 1 - 5e-6:       # where the equations have lost their digits, and p is this but for rounding
        return np.array([15 / 8 / high, -10 / 8 / high ** 3, 3 / 8 / high ** 5])
    inner, error = np.array([3 * low + high, low + 3 * high]) / 4, np.inf
    for _ in range(ROUNDS):
        x = np.array([low, *inner, high])
        *p, new = np.linalg.solve(np.stack([x, x ** 3, x ** 5, [1, -1, 1, -1]], 1), np.ones(4))
        if abs(new - error) <= 1e-15:
            break
        error, (a, b, c) = new, p
        inner = np.sqrt((-3 * b + np.array([-1, 1]) * np.sqrt(9 * b * b - 20 * a * c)) / (10 * c))     # p' = 0
    return np.array(p)


def at(p, x):
    """p(x)"""
    a, b, c = p
    return a * x + b * x ** 3 + c * x ** 5
