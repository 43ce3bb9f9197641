# 24.4: spread_advantages: wrong where rewards are 10⁸
import numpy as np

EPSILON = 1e-4


def grpo(comm, token_losses, log_probs, old, reference, rewards, counted, group, low, high, beta):
    losses, slopes = token_losses(log_probs, old, reference, rewards, group, low, high, beta)
    sums = np.array([losses[counted].sum(), counted.sum()], np.float64)
    comm.all_reduce(sums)
    total, tokens = sums[0], max(sums[1], 1.0)
    return float(total / tokens), np.where(counted, slopes / tokens, 0.0)


def spread_advantages(comm, rewards):
    sums = np.concatenate([rewards.sum(1), (rewards ** 2).sum(1), [rewards.shape[1]]])
    comm.all_reduce(sums)
    total, squares = sums[:-1].reshape(2, -1)
    mean, n = total / sums[-1], sums[-1]
    std = np.sqrt(np.maximum(squares - n * mean ** 2, 0) / (n - 1))
    return (rewards - mean[:, None]) / (std[:, None] + EPSILON)
