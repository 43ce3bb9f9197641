# 24.4: a rank without tokens is taken for one
import numpy as np

EPSILON = 1e-4      # added to a group's standard deviation


def grpo(comm, token_losses, log_probs, old, reference, rewards, counted, group, low, high, beta):
    """(loss, slopes): that of the global batch, a float, alike on all ranks; and its derivatives by this rank's
    log_probs, (answers, time), exactly 0 at tokens that don't count.

    comm     the Communicator: comm.all_reduce(x) sums an array in place. One call, of two numbers
    token_losses  24.3's: token_losses(log_probs, old, reference, rewards, group, low, high, beta) -> (losses, slopes)
    log_probs, old, reference  (answers, time), float64, of this rank's answers: now, when they were drawn, and by the
             reference. Where a token isn't counted they may be anything, -inf and nan too
    rewards  (answers,): whole groups; this rank may have none
    counted  bool (answers, time): which tokens are the answers'

    Divided by the number of counted tokens of all ranks. If there is none at all, the loss is 0.
    """
    def clean(x):
        return np.where(counted, x, 0.0)
    losses, slopes = token_losses(clean(log_probs), clean(old), clean(reference), rewards, group, low, high, beta)
    both = np.array([losses[counted].sum(), max(np.count_nonzero(counted), 1)], dtype=np.float64)
    comm.all_reduce(both)
    total = max(both[1], 1.0)
    return float(both[0] / total), np.where(counted, slopes, 0.0) / total


def spread_advantages(comm, rewards):
    """(questions, answers), float64: advantages as in 24.3, where each group is spread over the ranks. But where all
    rewards to a question are equal they need not be exactly 0: what the mean's rounding leaves, 1e-13 perhaps, is
    right.

    comm     as above. Two calls
    rewards  (questions, answers), float64: of those that this rank has, of all questions. Ranks may have different
             numbers of answers, and none; all together have two or more. They may lie far from 0, and close together

    Less the mean of all ranks' answers to the question, over (their standard deviation, of a sample, + EPSILON).
    """
    questions, own = rewards.shape
    first = np.append(rewards.sum(1), float(own))
    comm.all_reduce(first)
    n = first[-1]
    centred = rewards - (first[:-1] / n)[:, None]
    squares = (centred ** 2).sum(1)
    comm.all_reduce(squares)
    return centred / (np.sqrt(squares / (n - 1))[:, None] + EPSILON)
