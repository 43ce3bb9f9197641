# 26.2: powers of 2, the scale taking log₂ e into it; one grid axis; a product that is added to the sum by tl.dot
import math

import triton
import triton.language as tl


@triton.jit
def attention_kernel(q, k, v, out, lse, time, scale, q_head, q_time, k_head, k_time, v_head, v_time, out_head, out_time,
                     heads, SIZE: tl.constexpr, QUERIES: tl.constexpr, SOURCES: tl.constexpr):
    head, block = tl.program_id(0) % heads, tl.program_id(0) // heads
    features, rows = tl.arange(0, SIZE), block * QUERIES + tl.arange(0, QUERIES)
    inside = rows < time
    own = tl.load(q + head * q_head + rows[:, None] * q_time + features[None, :], mask=inside[:, None], other=0.0)
    largest = tl.full((QUERIES,), -1e38, tl.float32)
    total, found = tl.zeros((QUERIES,), tl.float32), tl.zeros((QUERIES, SIZE), tl.float32)
    for first in range(0, tl.minimum((block + 1) * QUERIES, time), SOURCES):
        places = first + tl.arange(0, SOURCES)
        keys = tl.load(k + head * k_head + places[None, :] * k_time + features[:, None], mask=places[None, :] < time,
                       other=0.0)
        scores = tl.dot(own, keys, input_precision="ieee") * scale
        scores = tl.where((places[None, :] <= rows[:, None]) & (places[None, :] < time), scores, -1e38)
        grown = tl.maximum(largest, tl.max(scores, axis=1))
        p = tl.exp2(scores - grown[:, None])
        shrink = tl.exp2(largest - grown)
        values = tl.load(v + head * v_head + places[:, None] * v_time + features[None, :], mask=places[:, None] < time,
                         other=0.0)
        found = tl.dot(p, values, found * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(p, axis=1)
        largest = grown
    tl.store(out + head * out_head + rows[:, None] * out_time + features[None, :], found / total[:, None],
             mask=inside[:, None])
    tl.store(lse + head * time + rows, (largest + tl.log2(total)) * 0.6931471805599453, mask=inside)


def attention(q, k, v, out, lse, scale, block=(32, 32)):
    (heads, time, size), (queries, sources) = q.shape, block
    steps = [step // q.itemsize for a in (q, k, v, out) for step in a.strides[:2]]
    attention_kernel[(triton.cdiv(time, queries) * heads,)](q, k, v, out, lse, time, scale * math.log2(math.e), *steps,
                                                            heads, size, queries, sources)
