# 24.5: rewards: of the answers alone
from typing import NamedTuple

import numpy as np


class Answers(NamedTuple):

    tokens: np.ndarray
    counted: np.ndarray
    rewards: np.ndarray
    mean: float


def stream(seed, step, question, answer):
    return np.random.default_rng([seed, step, question, answer])


def share(questions, rank, size):
    each, rest = divmod(questions, size)
    first = rank * each + min(rank, rest)
    return first, first + each + (rank < rest)


def draw(logits, noise, temperature):
    return np.argmax(logits / temperature + noise, axis=1)


def roll_out(comm, policy, questions, reward, group, count, end, seed, step, temperature=1.0):
    first, stop = share(len(questions), comm.rank, comm.size)
    tokens = np.repeat(questions[first:stop], group, axis=0)
    streams = [stream(seed, step, q, a) for q in range(first, stop) for a in range(group)]
    rows, time = tokens.shape
    ended = np.zeros(rows, bool)
    counted = np.zeros((rows, count), bool)
    for t in range(count):
        logits = policy(tokens)
        noise = np.array([s.gumbel(size=logits.shape[1]) for s in streams]).reshape(logits.shape)
        new = np.where(ended, end, draw(logits, noise, temperature))
        counted[:, t] = ~ended
        ended |= new == end
        tokens = np.concatenate([tokens, new[:, None]], axis=1)
    rewards = reward(tokens[:, time:])
    both = np.array([np.sum(rewards), rows], float)
    comm.all_reduce(both)
    return Answers(tokens.astype(np.int64), counted, rewards, float(both[0] / both[1]))
