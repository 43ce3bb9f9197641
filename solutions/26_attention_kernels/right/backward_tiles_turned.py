# 26.3: the second kernel's tiles are (keys, queries), nothing is turned; both kernels have one helper
import triton
import triton.language as tl


@triton.jit
def piece(array, head, at, time, step_head, step_time, SIZE: tl.constexpr):
    """What lies at these positions of a head; 0 behind the end."""
    features = tl.arange(0, SIZE)
    return tl.load(array + head * step_head + at[:, None] * step_time + features[None, :], mask=at[:, None] < time,
                   other=0.0)


@triton.jit
def queries_kernel(q, k, v, out, lse, out_bar, q_bar, D, time, scale, step_head, step_time, SIZE: tl.constexpr,
                   QUERIES: tl.constexpr, SOURCES: tl.constexpr):
    head, at = tl.program_id(1), tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    own = piece(q, head, at, time, step_head, step_time, SIZE) * scale
    bar = piece(out_bar, head, at, time, step_head, step_time, SIZE)
    d = tl.sum(piece(out, head, at, time, step_head, step_time, SIZE) * bar, axis=1)
    tl.store(D + head * time + at, d, mask=at < time)
    sums = tl.load(lse + head * time + at, mask=at < time, other=0.0)
    total = tl.zeros((QUERIES, SIZE), tl.float32)
    last = tl.minimum((tl.program_id(0) + 1) * QUERIES, time)
    for back in range(0, tl.cdiv(last, SOURCES)):
        places = (tl.cdiv(last, SOURCES) - 1 - back) * SOURCES + tl.arange(0, SOURCES)
        keys = piece(k, head, places, time, step_head, step_time, SIZE)
        values = piece(v, head, places, time, step_head, step_time, SIZE)
        scores = tl.dot(own, tl.trans(keys), input_precision="ieee")
        p = tl.where(places[None, :] <= at[:, None], tl.exp(tl.minimum(scores - sums[:, None], 1.0)), 0.0)
        total += tl.dot(p * (tl.dot(bar, tl.trans(values), input_precision="ieee") - d[:, None]), keys,
                        input_precision="ieee")
    features = tl.arange(0, SIZE)
    tl.store(q_bar + head * step_head + at[:, None] * step_time + features[None, :], total * scale,
             mask=at[:, None] < time)


@triton.jit
def sources_kernel(q, k, v, lse, out_bar, k_bar, v_bar, D, time, scale, step_head, step_time, SIZE: tl.constexpr,
                   QUERIES: tl.constexpr, SOURCES: tl.constexpr):
    head, places = tl.program_id(1), tl.program_id(0) * SOURCES + tl.arange(0, SOURCES)
    keys = piece(k, head, places, time, step_head, step_time, SIZE)
    values = piece(v, head, places, time, step_head, step_time, SIZE)
    of_keys, of_values = tl.zeros((SOURCES, SIZE), tl.float32), tl.zeros((SOURCES, SIZE), tl.float32)
    for first in range(tl.program_id(0) * SOURCES // QUERIES * QUERIES, time, QUERIES):
        at = first + tl.arange(0, QUERIES)
        own = piece(q, head, at, time, step_head, step_time, SIZE)
        bar = piece(out_bar, head, at, time, step_head, step_time, SIZE)
        sums = tl.load(lse + head * time + at, mask=at < time, other=float("inf"))
        d = tl.load(D + head * time + at, mask=at < time, other=0.0)
        scores = tl.dot(keys, tl.trans(own), input_precision="ieee") * scale - sums[None, :]
        p = tl.where(places[:, None] <= at[None, :], tl.exp(tl.minimum(scores, 1.0)), 0.0)
        of_values = tl.dot(p, bar, of_values, input_precision="ieee")
        s = p * (tl.dot(values, tl.trans(bar), input_precision="ieee") - d[None, :])
        of_keys = tl.dot(s, own, of_keys, input_precision="ieee")
    features, inside = tl.arange(0, SIZE), places[:, None] < time
    there = head * step_head + places[:, None] * step_time + features[None, :]
    tl.store(k_bar + there, of_keys * scale, mask=inside)
    tl.store(v_bar + there, of_values, mask=inside)


def attention_backward(q, k, v, out, lse, out_bar, q_bar, k_bar, v_bar, D, scale, block=(32, 32)):
    (heads, time, size), (queries, sources) = q.shape, block
    steps, sizes = [step // 4 for step in q.strides[:2]], (size, queries, sources)
    queries_kernel[(triton.cdiv(time, queries), heads)](q, k, v, out, lse, out_bar, q_bar, D, time, scale, *steps,
                                                        *sizes)
    sources_kernel[(triton.cdiv(time, sources), heads)](q, k, v, lse, out_bar, k_bar, v_bar, D, time, scale, *steps,
                                                        *sizes)
