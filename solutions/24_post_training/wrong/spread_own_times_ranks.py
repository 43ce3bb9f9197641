# 24.4: this rank's answers times the number of ranks
import numpy as np

EPSILON = 1e-4      # added to a group's standard deviation


def grpo(comm, token_losses, log_probs, old, reference, rewards, counted, group, low, high, beta):
    def clean(x):
        return np.where(counted, x, 0.0)
    losses, slopes = token_losses(clean(log_probs), clean(old), clean(reference), rewards, group, low, high, beta)
    both = np.array([losses[counted].sum(), np.count_nonzero(counted)], dtype=np.float64)
    comm.all_reduce(both)
    total = max(both[1], 1.0)
    return float(both[0] / total), np.where(counted, slopes, 0.0) / total


def spread_advantages(comm, rewards):
    questions, own = rewards.shape
    first = np.append(rewards.sum(1), float(own))
    comm.all_reduce(first)
    n = own * comm.size
    centred = rewards - (first[:-1] / n)[:, None]
    squares = (centred ** 2).sum(1)
    comm.all_reduce(squares)
    return centred / (np.sqrt(squares / (n - 1))[:, None] + EPSILON)
