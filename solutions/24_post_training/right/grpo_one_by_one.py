# 24.4: token by token; what the mean's rounding leaves is taken from the squares
import numpy as np

EPSILON = 1e-4


def grpo(comm, token_losses, log_probs, old, reference, rewards, counted, group, low, high, beta):
    tokens = [np.where(counted, each, 0.0) for each in (log_probs, old, reference)]
    losses, slopes = token_losses(*tokens, rewards, group, low, high, beta)
    sums = np.zeros(2)
    for at, counts in np.ndenumerate(counted):
        if counts:
            sums += losses[at], 1
        else:
            slopes[at] = 0
    comm.all_reduce(sums)
    if sums[1] == 0:
        return 0.0, slopes
    return sums[0] / sums[1], slopes / sums[1]


def spread_advantages(comm, rewards):
    questions, own = rewards.shape
    sums = np.zeros(questions + 1)
    for question in range(questions):
        sums[question] = sum(rewards[question])
    sums[-1] = own
    comm.all_reduce(sums)
    n = sums[-1]
    centred = rewards - (sums[:-1] / n)[:, None]
    both = np.concatenate([np.einsum("ij,ij->i", centred, centred), centred.sum(1)])
    comm.all_reduce(both)
    variance = (both[:questions] - both[questions:] ** 2 / n) / (n - 1)
    return centred / (np.sqrt(np.maximum(variance, 0)) + EPSILON)[:, None]
