# 24.3: clipped: only where probabilities lie far apart
import numpy as np

EPSILON = 1e-4


def advantages(rewards, group):
    rewards = np.asarray(rewards, np.float64).reshape(-1, group)
    found = rewards - rewards.mean(1, keepdims=True)
    found /= rewards.std(1, ddof=1, keepdims=True) + EPSILON
    found[rewards.max(1) == rewards.min(1)] = 0
    return found.reshape(-1)


def clipped(log_probs, old, a, low, high):
    a, ratio = a[:, None], np.exp(np.clip(log_probs - old, -20, 20))
    clipped_ratio = np.clip(ratio, 1 - low, 1 + high)
    gains = np.minimum(ratio * a, clipped_ratio * a)
    return -gains, np.where(ratio * a > clipped_ratio * a, 0.0, -ratio * a)


def k3(log_probs, reference):
    log_r = reference - log_probs
    return np.exp(log_r) - 1 - log_r, 1 - np.exp(log_r)


def dpo(chosen, rejected, reference_chosen, reference_rejected, beta):
    margin = beta * (chosen - reference_chosen - rejected + reference_rejected)
    return np.logaddexp(0, -margin), -beta * np.exp(-np.logaddexp(0, margin))


def token_losses(log_probs, old, reference, rewards, group, low=0.2, high=0.28, beta=0.04):
    losses, slopes = clipped(log_probs, old, advantages(rewards, group), low, high)
    estimates, away = k3(log_probs, reference)
    return losses + beta * estimates, slopes + beta * away
