"""23.4 How large, and on how much?

Small runs are cheap: a dozen of them, of N parameters on D tokens each, tell what a large one will come to, if the loss
goes as

    L(N, D) = E + A / N^α + B / D^β

E is what even an endless model with endless data would have; A / N^α is for the model being finite, B / D^β for the
data. The five numbers are found by least squares of log L (so that 1 % counts as 1 % everywhere), with Huber's loss in
the place of squares (so that a run that went wrong counts for little).
"""

from typing import NamedTuple

import numpy as np

DELTA = 1e-3        # where Huber's loss goes on as a straight line
# (a, b, e, α, β) to begin with: log A, log B, log E and the powers
STARTS = [np.array(start) for start in (
    (2.0, 2.0, 0.0, 0.7, 0.7), (2.0, 2.0, 0.0, 0.2, 0.2), (8.0, 8.0, 0.0, 0.2, 0.7), (8.0, 8.0, 0.0, 0.7, 0.2),
    (8.0, 8.0, 0.0, 0.3, 0.3), (2.0, 8.0, 0.0, 0.7, 0.7))]


class Law(NamedTuple):
    """The five numbers; all above 0."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float


def loss(law, n, d):
    """L of models of n parameters on d tokens: numbers, or arrays of one shape."""
    # begin with the formula
    return law.E + law.A / n ** law.alpha + law.B / d ** law.beta


def objective(theta, n, d, losses):
    """(value, gradient): how far the law is from the runs, and where to; a float, and an array of five.

    theta         (a, b, e, α, β), an array: of a law with A = exp(a), B = exp(b) and E = exp(e)
    n, d, losses  arrays, one number for each run

    The value is Σ Huber(r), where r is log L of the law less the run's log L, and

        Huber(r) = r² / 2               where |r| ≤ DELTA
                   DELTA (|r| - DELTA / 2)      elsewhere

    Starts lie where exp(a) or N^α overflows: log L is the logarithm of a sum of three exponentials, and can be had
    without (logsumexp).
    """
    # begin with three exponents, whose sum of exponentials is L. What does it change if their largest is taken away
    # from all of them, and added to the logarithm? The gradient then: of Huber, of the logarithm, of the exponents
    a, b, e, alpha, beta = theta
    terms = np.stack([a - alpha * np.log(n), b - beta * np.log(d), np.full(len(n), e)])
    top = terms.max(0)
    exps = np.exp(terms - top)
    r = top + np.log(exps.sum(0)) - np.log(losses)
    small = np.abs(r) <= DELTA
    value = np.where(small, r ** 2 / 2, DELTA * (np.abs(r) - DELTA / 2)).sum()
    slopes = np.clip(r, -DELTA, DELTA) * exps / exps.sum(0)
    gradient = slopes.sum(1).tolist() + [-slopes[0] @ np.log(n), -slopes[1] @ np.log(d)]
    return float(value), np.array(gradient)


def minimum(function, start, steps=300):
    """(value, theta) of the valley that `start` lies in, by BFGS; function(theta) gives (value, gradient)."""
    theta, inverse = np.array(start, float), np.eye(len(start))
    value, slope = function(theta)
    for _ in range(steps):
        way, size = -inverse @ slope, 1.0
        if way @ slope >= 0:
            inverse = np.eye(len(theta))
            way = -slope
        size = min(1.0, 2.0 / (np.abs(way).max() or 1.0))
        while size > 1e-12:
            new_value, new_slope = function(theta + size * way)
            if new_value <= value + 1e-4 * size * (way @ slope):
                break
            size /= 2
        else:
            break
        move, turn = size * way, new_slope - slope
        done = value - new_value <= 1e-13 * value
        theta, value, slope = theta + move, new_value, new_slope
        if done:
            break
        if (along := move @ turn) > 0:
            mixed = np.eye(len(theta)) - np.outer(move, turn) / along
            inverse = mixed @ inverse @ mixed.T + np.outer(move, move) / along
    return value, theta


def fit(n, d, losses):
    """The Law of some runs: arrays, one number for each. From a single start one may end in a valley that isn't the
    deepest: STARTS are several, some of which may end at one value."""
    # begin with one start, and what you get for it. Which of several results is the one?
    value, theta = min((minimum(lambda theta: objective(theta, n, d, losses), start) for start in STARTS),
                       key=lambda found: found[0])
    a, b, e, alpha, beta = theta.tolist()
    return Law(float(np.exp(e)), float(np.exp(a)), float(np.exp(b)), alpha, beta)


def optimal(law, compute):
    """(N, D), floats: the model and the tokens with the least loss that training with so many operations can reach.

    A step takes 6 of them for each parameter and token (chapter 14): compute = 6 N D.
    """
    # begin with D in terms of N. Where is the derivative of the loss by N, and so by log N, equal to 0?
    alpha, beta = law.alpha, law.beta
    ratio = (alpha * law.A / (beta * law.B)) ** (1 / (alpha + beta))
    n = ratio * (compute / 6) ** (beta / (alpha + beta))
    return n, compute / 6 / n
