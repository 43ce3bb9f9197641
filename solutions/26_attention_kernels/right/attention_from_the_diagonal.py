# 26.2: from the diagonal back to the first key; the mean so far is kept, and its weight
import triton
import triton.language as tl


@triton.jit
def attention_kernel(q, k, v, out, lse, time, scale, q_head, q_time, k_head, k_time, v_head, v_time, out_head, out_time,
                     SIZE: tl.constexpr, QUERIES: tl.constexpr, SOURCES: tl.constexpr):
    head, features = tl.program_id(1), tl.arange(0, SIZE)[None, :]
    rows = (tl.program_id(0) * QUERIES + tl.arange(0, QUERIES))[:, None]
    own = tl.load(q + head * q_head + rows * q_time + features, mask=rows < time, other=0.0)
    weight = tl.full((QUERIES, 1), -float("inf"), tl.float32)       # logarithm of the sum
    mean = tl.zeros((QUERIES, SIZE), tl.float32)
    blocks = tl.cdiv(tl.minimum((tl.program_id(0) + 1) * QUERIES, time), SOURCES)
    for number in range(0, blocks):
        places = (blocks - 1 - number) * SOURCES + tl.arange(0, SOURCES)
        keys = tl.load(k + head * k_head + places[:, None] * k_time + features, mask=places[:, None] < time, other=0.0)
        values = tl.load(v + head * v_head + places[:, None] * v_time + features, mask=places[:, None] < time,
                         other=0.0)
        scores = tl.dot(own, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(places[None, :] <= rows, scores, -float("inf"))
        top = tl.max(scores, axis=1)[:, None]
        least = tl.where(top == -float("inf"), 0.0, top)        # a row that sees nothing of this block
        p = tl.exp(scores - least)
        here = tl.sum(p, axis=1)[:, None]
        largest = tl.maximum(weight, tl.where(here > 0, top, -float("inf")))
        largest = tl.where(largest == -float("inf"), 0.0, largest)
        before, now = tl.exp(weight - largest), here * tl.exp(least - largest) * (here > 0).to(tl.float32)
        both = tl.where(before + now > 0, before + now, 1.0)
        shrink = tl.where(here > 0, tl.exp(least - largest), 0.0)
        mean = mean * (before / both) + tl.dot(p, values, input_precision="ieee") * (shrink / both)
        weight = tl.where(before + now > 0, largest + tl.log(both), -float("inf"))
    tl.store(out + head * out_head + rows * out_time + features, mean, mask=rows < time)
    tl.store(lse + head * time + rows, weight, mask=rows < time)


def attention(q, k, v, out, lse, scale, block=(32, 32)):
    (heads, time, size), (queries, sources) = q.shape, block
    steps = [step // q.itemsize for a in (q, k, v, out) for step in a.strides[:2]]
    attention_kernel[(triton.cdiv(time, queries), heads)](q, k, v, out, lse, time, scale, *steps, size, queries,
                                                          sources)
