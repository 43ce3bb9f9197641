# 24.3: clipped: ρ is upside down
"""24.3 The policy gradient of a group.

A model has written some answers to each question, and somebody gave them rewards. There is no target: what is known is
which answers were better than the others of their group. GRPO makes tokens of the better ones likelier, but not by too
much at once, and keeps close to the model that training began with, the reference. Each token's loss is

    -min(ρ A, clip(ρ, 1 - low, 1 + high) A) + beta · k3

    ρ    the token's probability now, over that when it was drawn        A   its answer's advantage
    k3   an estimate of how far the model is from the reference

A token's slope is the derivative of its loss by its log-probability now. By whom it was drawn, and the reference, are
constants.
"""

import numpy as np

EPSILON = 1e-4      # added to a group's standard deviation


def advantages(rewards, group):
    """How much better each answer is than its group: (answers,), float64.

    rewards  (answers,), float or int: those of a question's `group` ≥ 2 answers one after another; perhaps none

    Less the group's mean, over (the group's standard deviation + EPSILON); of a sample, so that its squares are divided
    by group - 1. Exactly 0 where all rewards of a group are equal, though their mean may be rounded.
    """
    # begin with a shape in which a group is an axis
    rewards = np.asarray(rewards, np.float64).reshape(-1, group)
    found = rewards - rewards.mean(1, keepdims=True)
    found /= rewards.std(1, ddof=1, keepdims=True) + EPSILON
    found[rewards.max(1) == rewards.min(1)] = 0
    return found.reshape(-1)


def clipped(log_probs, old, a, low, high):
    """(losses, slopes) of -min(ρ A, clip(ρ, 1 - low, 1 + high) A): arrays of the shape of log_probs. All float64.

    log_probs, old  (answers, time): of the tokens, now and when they were drawn; they may be so low that exp is 0
    a               (answers,): the answers' advantages
    """
    # begin with ρ. For which ρ has min chosen the clipped one, if A > 0, and if A < 0? What does it depend on there?
    a, ratio = a[:, None], np.exp(old - log_probs)
    clipped_ratio = np.clip(ratio, 1 - low, 1 + high)
    gains = np.minimum(ratio * a, clipped_ratio * a)
    return -gains, np.where(ratio * a > clipped_ratio * a, 0.0, -ratio * a)


def k3(log_probs, reference):
    """(estimates, slopes) of KL(policy ‖ reference), per token that the policy drew: r - 1 - log r, with r its
    probability by the reference over that by the policy."""
    # begin with log r
    log_r = reference - log_probs
    return np.exp(log_r) - 1 - log_r, 1 - np.exp(log_r)


def dpo(chosen, rejected, reference_chosen, reference_rejected, beta):
    """(losses, slopes) of another way, without groups: of pairs of answers, one preferred. Arrays (pairs,).

        -log σ(margin)      margin = beta · ((chosen - reference_chosen) - (rejected - reference_rejected))

    All four are the log-probabilities of whole answers, so margins may be ±1000. slopes: by chosen; those by rejected
    are the negative.
    """
    # begin with -log σ(m) = log(1 + exp(-m)): which of NumPy's functions is it? And what is its derivative?
    margin = beta * (chosen - reference_chosen - rejected + reference_rejected)
    return np.logaddexp(0, -margin), -beta * np.exp(-np.logaddexp(0, margin))


def token_losses(log_probs, old, reference, rewards, group, low=0.2, high=0.28, beta=0.04):
    """(losses, slopes) of each token: what `clipped` has, and beta times what k3 has. Arrays (answers, time).

    log_probs, old, reference  (answers, time), float64: of the tokens, now, when they were drawn, and by the reference
    rewards  (answers,): whole groups; there may be none
    """
    # begin with the answers' advantages
    losses, slopes = clipped(log_probs, old, advantages(rewards, group), low, high)
    estimates, away = k3(log_probs, reference)
    return losses + beta * estimates, slopes + beta * away
