# 26.2: scores that aren't seen become 0
"""26.2 Attention in one kernel: out = softmax(q kᵀ · scale) v, causal, and no score in memory.

A program has a block of queries and walks along the keys, block by block. Of each query it keeps three things on the
chip: the largest score so far, the sum of exponentials, and the sum of exponentials times values. When a larger score
comes, both sums are too large by one factor, and are scaled down:

    keys          0 ───►  SOURCES ───►  2 · SOURCES ───►
    queries   0  │■       ·             ·                    a block in which nobody sees anything isn't even loaded
              1  │■ ■     ·             ·
              2  │■ ■     ■ ■           ·

Of a query the logarithm of its sum is kept as well, lse: with it, backward makes any weight again (26.3).
"""

import triton
import triton.language as tl


@triton.jit
def attention_kernel(q, k, v, out, lse, time, scale, q_head, q_time, k_head, k_time, v_head, v_time, out_head, out_time,
                     SIZE: tl.constexpr, QUERIES: tl.constexpr, SOURCES: tl.constexpr):
    """What one program does: QUERIES neighbouring queries of one head.

    time              positions; the last block may go beyond
    q_head, q_time …  from one head of an array to the next, and from one position to the next, in elements; features
                      are neighbours, and so are a head's numbers in lse, whose heads are `time` apart
    SIZE              features of a head: a power of 2

    tl.trans(a) is a tile's transpose; tl.max(a, 1) and tl.sum(a, 1) are those of each row; tl.where(seen, a, b).
    """
    # begin with the positions of this program's queries, by tl.program_id(0), and its head, by tl.program_id(1); load
    # the queries once. Then the largest, tl.full((QUERIES,), -float("inf"), tl.float32), and the two sums, of zeros.
    # Where does the loop over blocks of keys end, for the last of these queries? In it: scores, those that aren't seen
    # -inf; the new largest; by what factor are the sums too large?
    head, first_query = tl.program_id(1), tl.program_id(0) * QUERIES
    queries, features = first_query + tl.arange(0, QUERIES), tl.arange(0, SIZE)[None, :]
    rows = queries[:, None]
    own = tl.load(q + head * q_head + rows * q_time + features, mask=rows < time, other=0.0) * scale
    largest = tl.full((QUERIES,), -float("inf"), tl.float32)
    total, found = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, SIZE), tl.float32)
    for first in range(0, tl.minimum(first_query + QUERIES, time), SOURCES):
        places = first + tl.arange(0, SOURCES)
        inside = places[:, None] < time
        keys = tl.load(k + head * k_head + places[:, None] * k_time + features, mask=inside, other=0.0)
        values = tl.load(v + head * v_head + places[:, None] * v_time + features, mask=inside, other=0.0)
        scores = tl.dot(own, tl.trans(keys), input_precision="ieee")
        scores = tl.where(places[None, :] <= rows, scores, 0.0)
        grown = tl.maximum(largest, tl.max(scores, 1))
        kept, p = tl.exp(largest - grown), tl.exp(scores - grown[:, None])
        total = total * kept + tl.sum(p, 1)
        found = found * kept[:, None] + tl.dot(p, values, input_precision="ieee")
        largest = grown
    tl.store(out + head * out_head + rows * out_time + features, found / total[:, None], mask=rows < time)
    tl.store(lse + head * time + queries, largest + tl.log(total), mask=queries < time)


def attention(q, k, v, out, lse, scale, block=(32, 32)):
    """Write attention into out, and into lse log Σ exp(score) of each query, a natural logarithm. One launch.

    q, k, v, out  float32 (heads, time, size), size a power of 2, 16 or more; heads and positions may be any distance
                  apart, features are neighbours
    lse           float32 (heads, time), contiguous
    scale         what q·k is multiplied by: scores are in the thousands, perhaps. A query sees the keys at its own
                  position and before it
    block         (QUERIES, SOURCES) of the kernel: powers of 2, 16 or more
    """
    # begin with the grid: blocks of queries, and heads. Then the steps of heads and positions, array by array
    (heads, time, size), (queries, sources) = q.shape, block
    steps = [step // q.itemsize for a in (q, k, v, out) for step in a.strides[:2]]
    attention_kernel[(triton.cdiv(time, queries), heads)](q, k, v, out, lse, time, scale, *steps, SIZE=size,
                                                          QUERIES=queries, SOURCES=sources)
