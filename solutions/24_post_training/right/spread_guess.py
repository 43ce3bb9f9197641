# 24.4: squares about a guess that all ranks share
import numpy as np

EPSILON = 1e-4


def grpo(comm, token_losses, log_probs, old, reference, rewards, counted, group, low, high, beta):
    losses, slopes = token_losses(log_probs, old, reference, rewards, group, low, high, beta)
    sums = np.array([losses[counted].sum(), counted.sum()], np.float64)
    comm.all_reduce(sums)
    total, tokens = sums[0], max(sums[1], 1.0)
    return float(total / tokens), np.where(counted, slopes / tokens, 0.0)


def spread_advantages(comm, rewards):
    first = np.append(rewards.sum(1), rewards.shape[1])
    comm.all_reduce(first)
    guess, n = first[:-1] / first[-1], first[-1]
    away = rewards - guess[:, None]
    second = np.stack([away.sum(1), (away * away).sum(1)])
    comm.all_reduce(second)
    shift = second[0] / n
    std = np.sqrt((second[1] - n * shift ** 2) / (n - 1))
    return (away - shift[:, None]) / (std[:, None] + EPSILON)
