# 24.5: a row gets the stream of another question
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
    least, more = divmod(questions, size)
    first = rank * least + min(rank, more)
    return first, first + least + (rank < more)


def draw(logits, noise, temperature):
    return (logits / temperature + noise).argmax(1)


def roll_out(comm, policy, questions, reward, group, count, end, seed, step, temperature=1.0):
    first, last = share(len(questions), comm.rank, comm.size)
    tokens = np.tile(questions[first:last], (group, 1))
    streams = [stream(seed, step, question, answer) for question in range(first, last) for answer in range(group)]
    counted = np.ones((len(tokens), count), bool)
    for at in range(count):
        if at:
            counted[:, at] = tokens[:, -1] != end
        logits = policy(tokens)
        noise = np.array([each.gumbel(size=logits.shape[1]) for each in streams]).reshape(logits.shape)
        new = np.where(counted[:, at], draw(logits, noise, temperature), end)
        tokens = np.concatenate([tokens, new[:, None]], 1)
    rewards = reward(tokens)
    sums = np.array([rewards.sum(), len(rewards)])
    comm.all_reduce(sums)
    return Answers(tokens, counted, rewards, float(sums[0] / sums[1]))
