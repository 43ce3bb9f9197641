"""19.5 Blocks that are chosen.

A ring makes room for all scores, and they remain T². Most weights are nearly 0. So let each query look at a few blocks
of keys only: at its own, up to itself, and at those before it whose mean key agrees with it most.

    blocks of 4          keys  0 1 2 3 │ 4 5 6 7 │ 8 9 … │ … 15 │ 16 …
    query 6                    ■ ■ ■ ■   ■ ■ ■
    query 17                   ■ ■ ■ ■             ■ ■ ■ ■         ■ ■         it chose the blocks of 0 and 8
    query 18                             ■ ■ ■ ■   ■ ■ ■ ■         ■ ■ ■       and this one others

That are count · size scores for each query, and one more for each block before it. Queries go to blocks as tokens to
experts: sorted by the block that they have chosen, and multiplied block by block.

    pairs by query     17:0 17:2 17:4 │ 18:1 18:2 18:4 │ …
    the same, by block 17:0 … │ 18:1 … │ 17:2 18:2 … │ … │ 17:4 18:4 …         one product with the keys of each block

Position t is in block t // size, and the last block may be shorter.
"""

import numpy as np


def mean_keys(k, size):
    """The mean key of each block that is whole: [heads, keys // size, features].

    k     [heads, keys, features], float64, as all that follows. It stays as it is
    size  keys in a block; there may be fewer keys than that, and then no whole block
    """
    # begin with the keys of whole blocks, and give blocks an axis of their own. Which axis is to vanish?
    heads, keys, features = k.shape
    blocks = keys // size
    return k[:, :blocks * size].reshape(heads, blocks, size, features).mean(2)


def choose(q, means, size, count):
    """Which blocks each query looks at: bool [heads, queries, blocks], blocks = queries / size, rounded up.

    q            [heads, queries, features], of positions 0, 1, 2 …
    means        [heads, queries // size, features]: of the blocks that are whole
    size, count  positions in a block; how many blocks a query looks at, 1 or more

    Its own, and of those wholly before it the count - 1 whose mean key has the greatest product with the query; the
    earlier of those with the same product. Where there are fewer before it, it looks at fewer. Each head chooses by
    itself.
    """
    # begin with a score for each query and block: the product, -inf where a block isn't before the query's own, and
    # for its own one that nothing exceeds. Which sort leaves equal ones in their order? And who has fewer blocks than
    # count?
    heads, queries, _ = q.shape
    number, own = np.arange(-(-queries // size)), np.arange(queries)[:, None] // size
    scores = np.full((heads, queries, len(number)), -np.inf)
    scores[:, :, :means.shape[1]] = q @ means.transpose(0, 2, 1)
    scores = np.where(number < own, scores, np.where(number == own, np.inf, -np.inf))
    best = np.argsort(-scores, axis=2, kind="stable")[:, :, :count]
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, best, True, axis=2)
    return chosen & (number <= own)


def block_attention(q, k, v, size, count, attention):
    """Causal attention of each query to the keys of the blocks that it chooses: out [heads, queries, width].

    q, k, v      [heads, queries, features] twice, [heads, queries, width]: of positions 0, 1, 2 …, as many queries as
                 keys. They stay as they are
    size, count  as above
    attention    yours, of 19.1: attention(q, k, v, q_at, k_at, before) -> (out, lse). All scores of queries and keys
                 are made by it, and none but those of chosen blocks: of each head it is called for a block at a time,
                 with all the queries that have chosen the block (twice, if you like to keep its own queries apart)

    Of the keys of its own block a query sees those up to itself. All that it sees is under one softmax.
    """
    # begin with the choice, and with out and lse of queries that have seen nothing yet, as in 19.4. Of one block: which
    # rows of the head's queries go there, at which positions, and what have they seen before?
    chosen = choose(q, mean_keys(k, size), size, count)
    out, lse, at = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf), np.arange(q.shape[1])
    for head, block in np.ndindex(len(q), chosen.shape[2]):
        one, keys = slice(head, head + 1), slice(block * size, (block + 1) * size)
        rows = np.flatnonzero(chosen[head, :, block])
        out[one, rows], lse[one, rows] = attention(q[one, rows], k[one, keys], v[one, keys], rows, at[keys],
                                                   (out[one, rows], lse[one, rows]))
    return out
