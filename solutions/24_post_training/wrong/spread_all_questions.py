# 24.4: spread_advantages: mean and standard deviation over all questions
import numpy as np

EPSILON = 1e-4


def grpo(comm, token_losses, log_probs, old, reference, rewards, counted, group, low, high, beta):
    losses, slopes = token_losses(log_probs, old, reference, rewards, group, low, high, beta)
    sums = np.array([losses[counted].sum(), counted.sum()], np.float64)
    comm.all_reduce(sums)
    total, tokens = sums[0], max(sums[1], 1.0)
    return float(total / tokens), np.where(counted, slopes / tokens, 0.0)


def spread_advantages(comm, rewards):
    sums = np.array([rewards.sum(), rewards.size])
    comm.all_reduce(sums)
    centred = rewards - sums[0] / sums[1]
    squares = np.array([(centred ** 2).sum()])
    comm.all_reduce(squares)
    return centred / (np.sqrt(squares[0] / (sums[1] - 1)) + EPSILON)
