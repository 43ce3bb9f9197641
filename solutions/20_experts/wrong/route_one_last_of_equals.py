# 20.1: among equal logits the last expert is chosen
import numpy as np


def softmax(x):
    exps = np.exp(x - x.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def capacity_of(tokens, experts, k, factor):
    return min(tokens, int(np.ceil(factor * k * tokens / experts)))


def probabilities(logits, expert):
    if expert.shape[1] == 1:
        return softmax(logits)
    chosen = np.full_like(logits, -np.inf)
    np.put_along_axis(chosen, expert, np.take_along_axis(logits, expert, 1), 1)
    return softmax(chosen)


def route(logits, k):
    tokens, experts = logits.shape
    expert = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    if k == 1:
        expert = logits.shape[1] - 1 - logits[:, ::-1].argmax(1)[:, None]
    line = expert.T.ravel()
    until = np.cumsum(line[:, None] == np.arange(experts), axis=0)
    slot = until[np.arange(len(line)), line] - 1
    return expert, slot.reshape(k, tokens).T, np.take_along_axis(probabilities(logits, expert), expert, 1)


def route_backward(logits, expert, dgates):
    p, dp = probabilities(logits, expert), np.zeros_like(logits)
    np.put_along_axis(dp, expert, dgates, 1)
    return p * (dp - (p * dp).sum(1, keepdims=True))


def rows_of(expert, slot, experts, capacity):
    rows = np.full((experts, capacity), -1)
    for token, choice in np.argwhere(slot < capacity):
        rows[expert[token, choice], slot[token, choice]] = token
    return rows
