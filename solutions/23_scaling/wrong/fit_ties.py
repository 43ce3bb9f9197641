# 23.4: The truth value of an array
from typing import NamedTuple

import numpy as np

DELTA = 1e-3
# (a, b, e, α, β) to begin with: log A, log B, log E and the powers
STARTS = [np.array(start) for start in (
    (2.0, 2.0, 0.0, 0.7, 0.7), (2.0, 2.0, 0.0, 0.2, 0.2), (8.0, 8.0, 0.0, 0.2, 0.7), (8.0, 8.0, 0.0, 0.7, 0.2),
    (8.0, 8.0, 0.0, 0.3, 0.3), (2.0, 8.0, 0.0, 0.7, 0.7))]


class Law(NamedTuple):
    E: float
    A: float
    B: float
    alpha: float
    beta: float


def loss(law, n, d):
    return law.E + law.A / n ** law.alpha + law.B / d ** law.beta


def objective(theta, n, d, losses):
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
    value, theta = min(minimum(lambda theta: objective(theta, n, d, losses), start) for start in STARTS)
    a, b, e, alpha, beta = theta.tolist()
    return Law(float(np.exp(e)), float(np.exp(a)), float(np.exp(b)), alpha, beta)


def optimal(law, compute):
    alpha, beta = law.alpha, law.beta
    ratio = (alpha * law.A / (beta * law.B)) ** (1 / (alpha + beta))
    n = ratio * (compute / 6) ** (beta / (alpha + beta))
    return n, compute / 6 / n
