# 24.5: the trick needs no exp
"""24.5 Rollouts on many ranks.

Before a step can be made of answers, somebody must write them. Each rank writes those to its own questions, and no rank
count may change what is written:

    questions of the global batch       q0 q1 q2 │ q3 q4            rank 0 │ rank 1
    `group` answers to each             q0a0 q0a1 q1a0 … │ q3a0 …   a group stays on one rank
    the random numbers of q3a0          stream(seed, step, 3, 0)    never of rank 1, nor of "its first question"

24.3 and 24.4 then make a loss of them.
"""

from typing import NamedTuple

import numpy as np


class Answers(NamedTuple):
    """What a rank has drawn.

    tokens   int64 (rows, time + count): questions with their answers; those to one question one after another
    counted  bool (rows, count): which of the answers' tokens count: all up to the first `end`, and that one, too
    rewards  (rows,)
    mean     float, of the rewards of all ranks, the same on all
    """

    tokens: np.ndarray
    counted: np.ndarray
    rewards: np.ndarray
    mean: float


def stream(seed, step, question, answer):
    """The random numbers of one answer: stream.gumbel(size=n) gives n of them, and other ones at the next call."""
    return np.random.default_rng([seed, step, question, answer])


def share(questions, rank, size):
    """(first, behind the last) of the questions that a rank has: one piece of them, in order. Pieces differ by one
    question at most, and the first ranks have the larger ones, as with np.array_split; with fewer questions than ranks
    the last ones' are empty, wherever these begin."""
    # begin with how many each has at least, and how many are left over
    least, more = divmod(questions, size)
    first = rank * least + min(rank, more)
    return first, first + least + (rank < more)


def draw(logits, noise, temperature):
    """(rows,): a sample of each row's softmax(logits / temperature), by Gumbel's trick: the index of the greatest, of
    what softmax gets with standard Gumbel noise added. logits, noise: (rows, vocabulary); temperature > 0."""
    # begin with which of the two the temperature divides
    return (np.log(np.exp(logits / temperature)) + noise).argmax(1)


def roll_out(comm, policy, questions, reward, group, count, end, seed, step, temperature=1.0):
    """Answers: `group` to each of this rank's questions.

    comm       the Communicator: comm.rank, comm.size; comm.all_reduce(x) sums an array in place. One call
    policy     policy(tokens (rows, time)) -> logits (rows, vocabulary) of the next token; rows ≥ 0
    questions  int64 (questions, time): those of the global batch, the same on all ranks
    reward     reward(tokens (rows, time + count)) -> (rows,), float64; rows ≥ 0
    count      tokens of an answer. Behind the first `end` it is filled up with `end`
    seed, step  of the training run

    Each answer has one stream, by the number of its question in the global batch and its own in the group. Of it, each
    token takes as many numbers as the vocabulary has.
    """
    # begin with this rank's questions, each `group` times, and a stream for each row. If rows that have ended are
    # filled up, their last token says that they have
    first, last = share(len(questions), comm.rank, comm.size)
    tokens = np.repeat(questions[first:last], group, 0)
    streams = [stream(seed, step, question, answer) for question in range(first, last) for answer in range(group)]
    counted = np.ones((len(tokens), count), bool)
    for at in range(count):
        if at:
            counted[:, at] = tokens[:, -1] != end
        logits = policy(tokens)
        noise = np.array([each.gumbel(size=logits.shape[1]) for each in streams]).reshape(logits.shape)
        new = np.where(counted[:, at], draw(logits, noise, temperature), end)
        tokens = np.concatenate([tokens, new[:, None]], 1)
    rewards = reward(tokens)
    sums = np.array([rewards.sum(), len(rewards)])
    comm.all_reduce(sums)
    return Answers(tokens, counted, rewards, float(sums[0] / sums[1]))
