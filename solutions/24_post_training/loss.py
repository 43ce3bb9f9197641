"""24.4 One loss on many ranks.

Answers have different lengths, so ranks have different numbers of tokens; and the loss is to be the mean of 24.3's over
all tokens of the global batch. A mean of means would weigh a token of a rank with few of them more, and the run on 4
ranks would learn something else than the one on 2.

    rank 0    ████ ██ ███████ ███           16 tokens that count
    rank 1    █ █ ██ █                       5              each of the 21 counts 1/21
    rank 2                                   0              … and this one must take part in the sum
"""

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
    # begin with what happens to nan where a token isn't counted: 0 · nan is nan. Which two sums are needed?
    losses, slopes = token_losses(log_probs, old, reference, rewards, group, low, high, beta)
    sums = np.array([losses[counted].sum(), counted.sum()], np.float64)
    comm.all_reduce(sums)
    total, tokens = sums[0], max(sums[1], 1.0)
    return float(total / tokens), np.where(counted, slopes / tokens, 0.0)


def spread_advantages(comm, rewards):
    """(questions, answers), float64: advantages as in 24.3, where each group is spread over the ranks. But where all
    rewards to a question are equal they need not be exactly 0: what the mean's rounding leaves, 1e-13 perhaps, is
    right.

    comm     as above. Two calls
    rewards  (questions, answers), float64: of those that this rank has, of all questions. Ranks may have different
             numbers of answers, and none; all together have two or more. They may lie far from 0, and close together

    Less the mean of all ranks' answers to the question, over (their standard deviation, of a sample, + EPSILON).
    """
    # begin with the mean, for which sums and a number of answers are needed. Why not Σ r² in the same message? Try
    # rewards of 10⁸ and 10⁸ + 1
    sums = np.append(rewards.sum(1), rewards.shape[1])
    comm.all_reduce(sums)
    centred = rewards - (sums[:-1] / sums[-1])[:, None]
    squares = (centred ** 2).sum(1)
    comm.all_reduce(squares)
    return centred / (np.sqrt(squares / (sums[-1] - 1)) + EPSILON)[:, None]
