# 20.1: has an inhomogeneous shape
import math

import numpy as np


def softmax(x):
    exps = np.exp(x - x.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def capacity_of(tokens, experts, k, factor):
    return min(tokens, math.ceil(factor * k * tokens / experts))


def probabilities(logits, expert):
    if expert.shape[1] == 1:
        return softmax(logits)
    chosen = np.full_like(logits, -np.inf)
    np.put_along_axis(chosen, expert, np.take_along_axis(logits, expert, 1), 1)
    return softmax(chosen)


def route(logits, k):
    tokens, experts = logits.shape
    expert = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    line = expert.T.ravel()
    until = np.cumsum(line[:, None] == np.arange(experts), axis=0)
    slot = until[np.arange(len(line)), line] - 1
    return expert, slot.reshape(k, tokens).T, np.take_along_axis(probabilities(logits, expert), expert, 1)


def route_backward(logits, expert, dgates):
    found = np.zeros_like(logits)
    for token, p in enumerate(probabilities(logits, expert)):
        jacobian = np.diag(p) - np.outer(p, p)
        found[token] = jacobian[:, expert[token]] @ dgates[token]
    return found


def rows_of(expert, slot, experts, capacity):
    queues = [[] for _ in range(experts)]
    for choice in range(expert.shape[1]):
        for token, chosen in enumerate(expert[:, choice]):
            queues[chosen].append(token)
    return np.array([(queue + [-1] * experts)[:capacity] for queue in queues])
