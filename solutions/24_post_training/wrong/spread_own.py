# 24.4: spread_advantages: each rank's own mean and
import numpy as np

EPSILON = 1e-4


def grpo(comm, token_losses, log_probs, old, reference, rewards, counted, group, low, high, beta):
    losses, slopes = token_losses(log_probs, old, reference, rewards, group, low, high, beta)
    sums = np.array([losses[counted].sum(), counted.sum()], np.float64)
    comm.all_reduce(sums)
    total, tokens = sums[0], max(sums[1], 1.0)
    return float(total / tokens), np.where(counted, slopes / tokens, 0.0)


def spread_advantages(comm, rewards):
    if not rewards.size:
        return rewards.copy()
    std = rewards.std(1, ddof=1, keepdims=True) if rewards.shape[1] > 1 else np.full((len(rewards), 1), np.nan)
    return (rewards - rewards.mean(1, keepdims=True)) / (std + EPSILON)
