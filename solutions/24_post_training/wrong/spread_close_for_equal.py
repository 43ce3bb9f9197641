# 24.4: close together are taken for equal ones
import numpy as np

EPSILON = 1e-4


def grpo(comm, token_losses, log_probs, old, reference, rewards, counted, group, low, high, beta):
    losses, slopes = token_losses(log_probs, old, reference, rewards, group, low, high, beta)
    sums = np.array([losses[counted].sum(), counted.sum()], np.float64)
    comm.all_reduce(sums)
    total, tokens = sums[0], max(sums[1], 1.0)
    return float(total / tokens), np.where(counted, slopes / tokens, 0.0)


def spread_advantages(comm, rewards):
    sums = np.append(rewards.sum(1), rewards.shape[1])
    comm.all_reduce(sums)
    centred = rewards - (sums[:-1] / sums[-1])[:, None]
    squares = (centred ** 2).sum(1)
    comm.all_reduce(squares)
    found = centred / (np.sqrt(squares / (sums[-1] - 1)) + EPSILON)[:, None]
    found[squares < 1e-18] = 0
    return found
