"""19.1 Softmax in pieces.

Softmax over a row seems to need the whole row: its greatest score, then the sum of its exponentials. It doesn't. Of
some of the keys two things say all that the others need to know: out, the values' mean, weighed by softmax among these
keys; and lse, the logarithm of the sum of their exponentials, which is the weight of this mean beside others.

Positions decide who sees what: a query sees the keys at its own position and before it. Queries and keys come with
their positions, which are integers in any order, since later they will be parts of a sequence.
"""

import numpy as np


def attend(q, k, v, q_at, k_at):
    """Attention to these keys, as if there were no others: (out [heads, queries, width], lse [heads, queries]).

    q           [heads, queries, size], float64, as all that follows
    k, v        [heads, keys, size] and [heads, keys, width], of one key or more
    q_at, k_at  integers [queries] and [keys]: positions

    A score is q·k / √size, and may be in the thousands, of either sign. lse is the natural logarithm of the sum of the
    exponentials of the scores that are seen. Where a query sees none of these keys, out is 0 and lse is -inf.
    """
    raise NotImplementedError("begin with the scores, [heads, queries, keys], and -inf where k_at > q_at. What is the"
                              " greatest of a row that has nothing but -inf, and what is -inf - -inf?")


def merge(one, other):
    """Attention to all keys of two sets that have none in common: (out, lse).

    one, other  (out, lse) of each set, as attend gives them. They stay as they are
    """
    raise NotImplementedError("begin with lse: the logarithm of a sum of two numbers of which you have the "
                              "logarithms. exp(lse) would overflow; what is the exponential of a difference?")


def attention(q, k, v, q_at, k_at, before=None, block=64):
    """What attend gives, by `block` keys at a time (the last ones may be fewer): (out, lse).

    before  None, or the (out, lse) of other keys: then the result is that of all keys together. Stays as it is

    Beside its arguments and results it holds no more than it takes for one block, however many keys there are.
    """
    raise NotImplementedError("begin with the first block: is there anything to merge it with?")
