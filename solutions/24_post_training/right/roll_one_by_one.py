# 24.5: each answer by itself, ended where it ends
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
    time = questions.shape[1]
    tokens = np.full(((last - first) * group, time + count), end, np.int64)
    counted = np.zeros((len(tokens), count), bool)
    for row in range(len(tokens)):
        question, answer = first + row // group, row % group
        numbers = stream(seed, step, question, answer)
        tokens[row, :time] = questions[question]
        for at in range(time, time + count):
            logits = policy(tokens[row:row + 1, :at])
            tokens[row, at] = draw(logits, numbers.gumbel(size=(1, logits.shape[1])), temperature)[0]
            counted[row, at - time] = True
            if tokens[row, at] == end:
                break
    rewards = reward(tokens)
    message = np.array([len(rewards), sum(rewards.tolist())], float)
    comm.all_reduce(message)
    return Answers(tokens, counted, rewards, message[1] / message[0])
