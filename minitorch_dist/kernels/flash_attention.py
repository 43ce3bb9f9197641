"""Flash attention: softmax(q kᵀ · scale) v and its gradient, without the matrix of weights in memory.

With p = softmax(q kᵀ · scale), row by row, and o = p v:

    v̄ = pᵀ ō        δ = Σ ō·o        s̄ = p·(ō vᵀ - δ)        q̄ = s̄ k · scale        k̄ = s̄ᵀ q · scale

Forward: a program has a block of queries and walks along the sources. Of each row it keeps the largest score so far,
the sum of exponentials and the sum of exponentials times values; where the maximum grows, both sums are scaled down. It
writes o and, for backward, the logarithm of the sum, L: then p = exp(score - L), block by block, when it is needed
again. So 4 bytes per query are kept instead of times × sources weights, and scores stay on the chip: per float32
weight that saves 48 bytes in forward and 60 in backward, as ops/attention.py makes them. Backward makes q kᵀ and ō vᵀ
twice, for that is arithmetic instead of memory.

    flash_attention             a block of queries      for each block of sources: scores, o; then L
    flash_attention_queries     a block of queries      δ; for each block of sources: q̄
    flash_attention_sources     a block of sources      for each block of queries: k̄ and v̄; it reads δ

Every sum belongs to one program: no atomics, the same bits on every run. Causal: position t looks at sources 0 … t, and
blocks of which nothing is seen are never loaded, half of all. Heads may share keys and values in groups; then k̄ and v̄
are summed over the group by the same program. Exponentials are powers of 2, the scale taking log₂ e into it.

Documents: positions have numbers, and look at their own number alone. A program whose rows have the numbers a … b walks
from the first to the last position on the other side that has one of these: where documents lie side by side, next to
nothing is loaded in vain; where they don't, it is more, and as right.

Sources: Dao et al. 2022, "FlashAttention"; Dao 2023, "FlashAttention-2"; Milakov & Gimelshein 2018 (the running sum).
"""

import numpy as np
import triton
import triton.language as tl

from . import Kept, Op, launch
from .autotune import best
from .kernel import BELOW_80, Kernel

LOG2_E = tl.constexpr(1.4426950408889634)
WIDEST = 128        # elements of a head
SCAN = tl.constexpr(1024)       # numbers of documents that are looked at at once
# (kernel, bytes of an element, heads up to this size) -> block of queries, block of sources, warps, where nothing has
# been measured: large ones whose code for sm_90 keeps all in registers (`--show sass` has no STL), causal or not, but
# for some bytes in float32. See block_options.
BLOCKS = {
    ("flash_attention", 2, 64): (64, 64, 4), ("flash_attention", 2, 128): (64, 64, 4),
    ("flash_attention", 4, 64): (32, 32, 4), ("flash_attention", 4, 128): (32, 16, 8),
    ("flash_attention_queries", 2, 64): (64, 64, 4), ("flash_attention_queries", 2, 128): (64, 64, 8),
    ("flash_attention_queries", 4, 64): (32, 32, 4), ("flash_attention_queries", 4, 128): (32, 16, 8),
    ("flash_attention_sources", 2, 64): (32, 64, 4), ("flash_attention_sources", 2, 128): (32, 64, 8),
    ("flash_attention_sources", 4, 64): (16, 32, 4), ("flash_attention_sources", 4, 128): (16, 32, 4),
}
# With documents, whose numbers are in registers, too.
DOCUMENTS = BLOCKS | {
    ("flash_attention", 4, 64): (32, 16, 4), ("flash_attention", 4, 128): (32, 16, 4),
    ("flash_attention_queries", 2, 64): (64, 32, 4), ("flash_attention_queries", 4, 128): (32, 16, 4),
}


@triton.jit
def _rows(base, row, stride, limit, SIZE: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr):
    """A tile of rows of SIZE elements, WIDTH with zeros; RAGGED: rows from `limit` on are zeros too."""
    column = tl.arange(0, WIDTH)
    at = base + row[:, None] * stride + column[None, :]
    if RAGGED:
        return tl.load(at, mask=(row < limit)[:, None] & (column < SIZE)[None, :], other=0.0)
    elif SIZE < WIDTH:
        return tl.load(at, mask=(column < SIZE)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _store_rows(base, row, stride, limit, tile, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    tl.store(base + row[:, None] * stride + column[None, :], tile.to(base.dtype.element_ty),
             mask=(row < limit)[:, None] & (column < SIZE)[None, :])


@triton.jit
def _sees(t, s, sources, own, theirs, CAUSAL: tl.constexpr):
    """Which sources s positions t may look at: (t, s) bool. own: numbers of t's documents; theirs: where those of all
    sources are; or None."""
    sees = (t[:, None] >= 0) & (s < sources)[None, :]
    if CAUSAL:
        sees = sees & (s[None, :] <= t[:, None])
    if theirs is not None:
        sees = sees & (own[:, None] == _numbers(theirs, s, sources)[None, :])
    return sees


@triton.jit
def _numbers(documents, row, limit):
    return tl.load(documents + row, mask=row < limit, other=0)


@triton.jit
def _stretch(own, valid, theirs, limit):
    """(begin, end): outside of this stretch none of `theirs`, `limit` numbers, is between the least and the greatest of
    one's own."""
    least = tl.min(tl.where(valid, own, 2 ** 63 - 1))
    most = tl.max(tl.where(valid, own, -2 ** 63))
    begin, end = limit, 0
    for start in range(0, limit, SCAN):
        s = start + tl.arange(0, SCAN)
        number = _numbers(theirs, s, limit)
        near = (number >= least) & (number <= most) & (s < limit)
        begin = tl.minimum(begin, tl.min(tl.where(near, s, limit)))
        end = tl.maximum(end, tl.max(tl.where(near, s + 1, 0)))
    return begin, end


@triton.jit
def _reach(first, sources, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, SOURCES: tl.constexpr):
    """(full, end) for the queries from `first` on: up to `full` they see whole blocks of sources, up to `end` any."""
    full = sources
    end = sources
    if CAUSAL:
        full = tl.minimum(first + 1, sources)
        end = tl.minimum(first + QUERIES, sources)
    return full // SOURCES * SOURCES, end


@triton.jit
def _attend(total, most, weight, q_tile, k, v, own, theirs, t, start, k_t, v_t, sources, scale, CAUSAL: tl.constexpr,
            EDGE: tl.constexpr, SIZE: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr,
            OUT_WIDTH: tl.constexpr, PRECISION: tl.constexpr, SOURCES: tl.constexpr):
    """One block of sources more."""
    s = start + tl.arange(0, SOURCES)
    k_tile = _rows(k, s, k_t, sources, SIZE, WIDTH, EDGE)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
    if EDGE:
        scores = tl.where(_sees(t, s, sources, own, theirs, CAUSAL), scores, -float("inf"))
    larger = tl.maximum(most, tl.max(scores, axis=1))
    base = larger
    if theirs is not None:
        base = tl.where(larger == -float("inf"), 0.0, larger)       # of rows that have seen nothing yet
    p = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    v_tile = _rows(v, s, v_t, sources, OUT, OUT_WIDTH, EDGE)
    total = tl.dot(p.to(v_tile.dtype), v_tile, total * shrink[:, None], input_precision=PRECISION)
    return total, larger, weight * shrink + tl.sum(p, axis=1)


@triton.jit
def _forward(q, k, v, documents, theirs, out, logs, heads, share, times, sources, scale, q_b, q_h, q_t, k_b, k_h, k_t,
             v_b, v_h, v_t, o_b, o_h, o_t, CAUSAL: tl.constexpr, SIZE: tl.constexpr, OUT: tl.constexpr,
             WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr,
             SOURCES: tl.constexpr):
    blocks = tl.cdiv(times, QUERIES)
    one = tl.program_id(0) // blocks
    batch, head = one // heads, one % heads
    first = (blocks - 1 - tl.program_id(0) % blocks) * QUERIES      # causal: those with most to do begin
    t = first + tl.arange(0, QUERIES)
    q_tile = _rows(q + batch * q_b + head * q_h, t, q_t, times, SIZE, WIDTH, True)
    k = k + batch * k_b + head // share * k_h
    v = v + batch * v_b + head // share * v_h
    scale = scale * LOG2_E

    total = tl.zeros((QUERIES, OUT_WIDTH), tl.float32)
    most = tl.full((QUERIES,), -float("inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    own = documents
    full, end = _reach(first, sources, CAUSAL, QUERIES, SOURCES)
    if documents is None:
        for start in range(0, full, SOURCES):
            total, most, weight = _attend(total, most, weight, q_tile, k, v, None, None, t, start, k_t, v_t, sources,
                                          scale, CAUSAL, False, SIZE, OUT, WIDTH, OUT_WIDTH, PRECISION, SOURCES)
    else:
        own = _numbers(documents + batch.to(tl.int64) * times, t, times)
        theirs = theirs + batch.to(tl.int64) * sources
        full, last = _stretch(own, t < times, theirs, sources)
        full, end = full // SOURCES * SOURCES, tl.minimum(end, last)
    for start in range(full, end, SOURCES):
        total, most, weight = _attend(total, most, weight, q_tile, k, v, own, theirs, t, start, k_t, v_t, sources,
                                      scale, CAUSAL, True, SIZE, OUT, WIDTH, OUT_WIDTH, PRECISION, SOURCES)
    if documents is not None:
        weight = tl.where(most == -float("inf"), 1.0, weight)       # rows that see nothing give 0
    _store_rows(out + batch * o_b + head * o_h, t, o_t, times, total / weight[:, None], OUT, OUT_WIDTH)
    tl.store(logs + one.to(tl.int64) * times + t, most + tl.log2(weight), mask=t < times)


@triton.jit
def _pull_queries(total, q_tile, c_tile, log, delta, k, v, own, theirs, t, start, k_t, v_t, sources, scale,
                  CAUSAL: tl.constexpr, EDGE: tl.constexpr, SIZE: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr,
                  OUT_WIDTH: tl.constexpr, PRECISION: tl.constexpr, SOURCES: tl.constexpr):
    """What one block of sources adds to q̄."""
    s = start + tl.arange(0, SOURCES)
    k_tile = _rows(k, s, k_t, sources, SIZE, WIDTH, EDGE)
    v_tile = _rows(v, s, v_t, sources, OUT, OUT_WIDTH, EDGE)
    p = tl.exp2(tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale - log[:, None])
    if EDGE:
        p = tl.where(_sees(t, s, sources, own, theirs, CAUSAL), p, 0.0)
    g = p * (tl.dot(c_tile, tl.trans(v_tile), input_precision=PRECISION) - delta[:, None])
    return tl.dot(g.to(k_tile.dtype), k_tile, total, input_precision=PRECISION)


@triton.jit
def _queries(ct, q, k, v, documents, theirs, out, logs, deltas, gq, heads, share, times, sources, scale, c_b, c_h, c_t,
             q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, gq_b, gq_h, gq_t, CAUSAL: tl.constexpr,
             SIZE: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr,
             PRECISION: tl.constexpr, QUERIES: tl.constexpr, SOURCES: tl.constexpr):
    blocks = tl.cdiv(times, QUERIES)
    one = tl.program_id(0) // blocks
    batch, head = one // heads, one % heads
    first = (blocks - 1 - tl.program_id(0) % blocks) * QUERIES
    t = first + tl.arange(0, QUERIES)
    row = one.to(tl.int64) * times + t
    q_tile = _rows(q + batch * q_b + head * q_h, t, q_t, times, SIZE, WIDTH, True)
    c_tile = _rows(ct + batch * c_b + head * c_h, t, c_t, times, OUT, OUT_WIDTH, True)
    o_tile = _rows(out + batch * o_b + head * o_h, t, o_t, times, OUT, OUT_WIDTH, True)
    delta = tl.sum(c_tile.to(tl.float32) * o_tile.to(tl.float32), axis=1)
    tl.store(deltas + row, delta, mask=t < times)
    log = tl.load(logs + row, mask=t < times, other=float("inf"))
    k = k + batch * k_b + head // share * k_h
    v = v + batch * v_b + head // share * v_h
    scale2 = scale * LOG2_E

    total = tl.zeros((QUERIES, WIDTH), tl.float32)
    own = documents
    full, end = _reach(first, sources, CAUSAL, QUERIES, SOURCES)
    if documents is None:
        for start in range(0, full, SOURCES):
            total = _pull_queries(total, q_tile, c_tile, log, delta, k, v, None, None, t, start, k_t, v_t, sources,
                                  scale2, CAUSAL, False, SIZE, OUT, WIDTH, OUT_WIDTH, PRECISION, SOURCES)
    else:
        own = _numbers(documents + batch.to(tl.int64) * times, t, times)
        theirs = theirs + batch.to(tl.int64) * sources
        full, last = _stretch(own, t < times, theirs, sources)
        full, end = full // SOURCES * SOURCES, tl.minimum(end, last)
    for start in range(full, end, SOURCES):
        total = _pull_queries(total, q_tile, c_tile, log, delta, k, v, own, theirs, t, start, k_t, v_t, sources,
                              scale2, CAUSAL, True, SIZE, OUT, WIDTH, OUT_WIDTH, PRECISION, SOURCES)
    _store_rows(gq + batch * gq_b + head * gq_h, t, gq_t, times, total * scale, SIZE, WIDTH)


@triton.jit
def _pull_sources(k_total, v_total, k_tile, v_tile, ct, q, documents, own, logs, deltas, s, start, c_t, q_t, times,
                  scale, EDGE: tl.constexpr, SIZE: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr,
                  OUT_WIDTH: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr):
    """What one block of queries adds to k̄ and v̄. Scores are transposed here: (sources, queries)."""
    t = start + tl.arange(0, QUERIES)
    q_tile = _rows(q, t, q_t, times, SIZE, WIDTH, True)
    c_tile = _rows(ct, t, c_t, times, OUT, OUT_WIDTH, True)
    log = tl.load(logs + t, mask=t < times, other=float("inf"))      # queries behind the last have p = 0
    delta = tl.load(deltas + t, mask=t < times, other=0.0)
    p = tl.exp2(tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * scale - log[None, :])
    if EDGE:
        p = tl.where(s[:, None] <= t[None, :], p, 0.0)
    if documents is not None:
        p = tl.where(own[:, None] == _numbers(documents, t, times)[None, :], p, 0.0)
    v_total = tl.dot(p.to(c_tile.dtype), c_tile, v_total, input_precision=PRECISION)
    g = p * (tl.dot(v_tile, tl.trans(c_tile), input_precision=PRECISION) - delta[None, :])
    return tl.dot(g.to(q_tile.dtype), q_tile, k_total, input_precision=PRECISION), v_total


@triton.jit
def _sources(ct, q, k, v, documents, theirs, logs, deltas, gk, gv, heads, share, times, sources, scale, c_b, c_h, c_t,
             q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, gk_b, gk_h, gk_t, gv_b, gv_h, gv_t, CAUSAL: tl.constexpr,
             SIZE: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr,
             PRECISION: tl.constexpr, QUERIES: tl.constexpr, SOURCES: tl.constexpr):
    blocks = tl.cdiv(sources, SOURCES)
    one = tl.program_id(0) // blocks
    kv_heads = heads // share
    batch, kv_head = one // kv_heads, one % kv_heads
    first = tl.program_id(0) % blocks * SOURCES
    s = first + tl.arange(0, SOURCES)
    k_tile = _rows(k + batch * k_b + kv_head * k_h, s, k_t, sources, SIZE, WIDTH, True)
    v_tile = _rows(v + batch * v_b + kv_head * v_h, s, v_t, sources, OUT, OUT_WIDTH, True)

    # Causal: queries before `begin` see nothing of this block, those from `full` on all of it.
    begin = 0
    full = 0
    if CAUSAL:
        begin = first // QUERIES * QUERIES
        full = tl.cdiv(first + SOURCES - 1, QUERIES) * QUERIES
    own = theirs
    if documents is not None:       # all is looked at one by one, from `begin` to `full`
        own = _numbers(theirs + batch.to(tl.int64) * sources, s, sources)
        documents = documents + batch.to(tl.int64) * times
        near, full = _stretch(own, s < sources, documents, times)
        begin = tl.maximum(begin, near // QUERIES * QUERIES)
    k_total = tl.zeros((SOURCES, WIDTH), tl.float32)
    v_total = tl.zeros((SOURCES, OUT_WIDTH), tl.float32)
    for member in range(0, share):
        head = kv_head * share + member
        c_at, q_at = ct + batch * c_b + head * c_h, q + batch * q_b + head * q_h
        row = (batch * heads + head).to(tl.int64) * times
        logs_at, deltas_at = logs + row, deltas + row
        for start in range(begin, tl.minimum(full, times), QUERIES):
            k_total, v_total = _pull_sources(k_total, v_total, k_tile, v_tile, c_at, q_at, documents, own, logs_at,
                                             deltas_at, s, start, c_t, q_t, times, scale * LOG2_E, CAUSAL, SIZE, OUT,
                                             WIDTH, OUT_WIDTH, PRECISION, QUERIES)
        if documents is None:
            for start in range(full, times, QUERIES):
                k_total, v_total = _pull_sources(k_total, v_total, k_tile, v_tile, c_at, q_at, None, None, logs_at,
                                                 deltas_at, s, start, c_t, q_t, times, scale * LOG2_E, False, SIZE, OUT,
                                                 WIDTH, OUT_WIDTH, PRECISION, QUERIES)
    _store_rows(gk + batch * gk_b + kv_head * gk_h, s, gk_t, sources, k_total * scale, SIZE, WIDTH)
    _store_rows(gv + batch * gv_b + kv_head * gv_h, s, gv_t, sources, v_total, OUT, OUT_WIDTH)


def weights(q, k, causal, scale, documents=None):
    """softmax(q kᵀ · scale) in NumPy: (batch, heads, times, sources)."""
    scores = q @ np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3) * scale
    sees = np.tri(*scores.shape[2:], dtype=bool) if causal else np.ones(scores.shape[2:], bool)
    if documents is not None:
        own, theirs = documents
        sees = sees & (own[:, None, :, None] == theirs[:, None, None, :])
    scores = np.where(sees, scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True, initial=np.finfo(scores.dtype).min))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total > 0, total, 1)


def definition(q, k, v, causal, scale, documents=None):
    """The same in NumPy."""
    return weights(q, k, causal, scale, documents) @ np.repeat(v, q.shape[1] // k.shape[1], axis=1)


def gradient(ct, q, k, v, causal, scale, documents=None):
    """The cotangents of q, k and v in NumPy."""
    share, p = q.shape[1] // k.shape[1], weights(q, k, causal, scale, documents)
    k_all, v_all = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
    s = ct @ v_all.swapaxes(2, 3)
    s = p * (s - (s * p).sum(axis=-1, keepdims=True)) * scale

    def summed(g):
        return g.reshape(k.shape[0], k.shape[1], share, *g.shape[2:]).sum(axis=2)
    return s @ k_all, summed(s.swapaxes(2, 3) @ q), summed(p.swapaxes(2, 3) @ ct)


def _strides(*names):
    """Steps along batch, head and time, in elements; the last axis has step 1."""
    return {f"{name}_{axis}": "i32" if axis == "t" else "i64" for name in names for axis in "bht"}


def _record(name, fn, arrays, strides, **more):
    """A Kernel of this family: arrays, numbers, strides, and the constants of all."""
    numbers = {"heads": "i32", "share": "i32", "times": "i32", "sources": "i32", "scale": "fp32"}
    steps = _strides(*strides)
    blocks = ((16, 32, 4), (32, 32, 4), (32, 64, 4), (32, 64, 8), (64, 32, 4), (64, 64, 4), (64, 64, 8), (128, 32, 4),
              (128, 64, 4), (128, 64, 8), (64, 128, 8))
    return Kernel(
        name, fn, {**arrays, **numbers, **steps},
        {"CAUSAL": True, "SIZE": 64, "OUT": 64, "WIDTH": 64, "OUT_WIDTH": 64, "PRECISION": "ieee", "QUERIES": 64,
         "SOURCES": 64},
        divisible=tuple(steps), strided=tuple(a for a, kind in arrays.items() if kind == "*"), num_stages=2,
        configs=tuple({"QUERIES": q, "SOURCES": s, "num_warps": warps, "num_stages": stages}
                      for q, s, warps in blocks for stages in (2, 3)), **more)


def block_options(kernel, itemsize, size, capability, documents=False):
    """The options where nothing has been measured.

    Below 8.0 Triton multiplies without tensor cores: there the blocks are those of float32, which has none either. The
    forward kernel of float16 in blocks of (64, 64) would keep 3.7 KB of each thread in memory, in (32, 32) none.
    """
    table = DOCUMENTS if documents else BLOCKS
    blocks = table[kernel, itemsize if capability >= 80 else 4, 64 if size <= 64 else 128]
    return dict(zip(("QUERIES", "SOURCES", "num_warps"), blocks, strict=True))


def _example(kernel, dtype, size, documents=False, **more):
    """An example as a call of heads of `size` makes it."""
    more |= {} if documents else WITHOUT
    width, itemsize = launch.next_power_of_2(size), 4 if dtype == "fp32" else 2
    return {"*": dtype, "SIZE": size, "OUT": size, "WIDTH": width, "OUT_WIDTH": width,
            **block_options(kernel, itemsize, size, 90, documents),
            BELOW_80: block_options(kernel, itemsize, size, 75, documents), **more}


def _with_documents(kernel):
    return _example(kernel, "fp16", 64, True), _example(kernel, "fp32", 24, True)


NUMBERS = {"documents": "*i64", "theirs": "*i64"}        # of the queries' documents, of the sources'
WITHOUT = dict.fromkeys(NUMBERS)
FORWARD = _record(
    "flash_attention", _forward, {"q": "*", "k": "*", "v": "*", **NUMBERS, "out": "*", "logs": "*fp32"}, "qkvo",
    examples=(_example("flash_attention", "fp16", 64), _example("flash_attention", "fp32", 24),
              _example("flash_attention", "bf16", 128, CAUSAL=False),
              *_with_documents("flash_attention")))
QUERIES = _record(
    "flash_attention_queries", _queries,
    {"ct": "*", "q": "*", "k": "*", "v": "*", **NUMBERS, "out": "*", "logs": "*fp32", "deltas": "*fp32",
     "gq": "*"},
    ("c", "q", "k", "v", "o", "gq"),
    examples=(_example("flash_attention_queries", "fp16", 64), _example("flash_attention_queries", "fp32", 24),
              *_with_documents("flash_attention_queries")))
SOURCES = _record(
    "flash_attention_sources", _sources,
    {"ct": "*", "q": "*", "k": "*", "v": "*", **NUMBERS, "logs": "*fp32", "deltas": "*fp32", "gk": "*",
     "gv": "*"},
    ("c", "q", "k", "v", "gk", "gv"),
    examples=(_example("flash_attention_sources", "fp16", 64), _example("flash_attention_sources", "fp32", 24),
              *_with_documents("flash_attention_sources")))
KERNELS = (FORWARD, QUERIES, SOURCES)


def _constants(q, v, causal, precision):
    size, out = q.shape[3], v.shape[3]
    width, out_width = (max(16, launch.next_power_of_2(n)) for n in (size, out))
    return {"CAUSAL": bool(causal), "SIZE": size, "OUT": out, "WIDTH": width, "OUT_WIDTH": out_width,
            "PRECISION": precision}


def _blocks(kernel, q, v, documents):
    return block_options(kernel.name, q.itemsize, max(q.shape[3], v.shape[3]), launch.capability(q),
                         documents is not None)


def _sizes(q, k, documents):
    """What measured options are for. With documents it is other code, which has less to do."""
    batch, heads, times, size = q.shape
    return batch * heads, times, k.shape[2], size, *([] if documents is None else [1])


def _side_by_side(x):
    """The array, or a copy whose last axis lies side by side in memory."""
    return x if x.shape[3] == 1 or x.strides[3] == x.itemsize else launch.contiguous(x)


def _steps(*arrays):
    return [s // x.itemsize for x in arrays for s in x.strides[:3]]


def _empty(x, size, like):
    """An output (batch, heads, time, size) with x's leading axes and x's order of heads and time in memory: heads that
    were split off a row of features are merged again without a copy."""
    batch, heads, time = x.shape[:3]
    if x.strides[1] < x.strides[2]:
        return launch.empty((batch, time, heads, size), like.dtype, like).swapaxes(1, 2)
    return launch.empty((batch, heads, time, size), like.dtype, like)


def _documents(documents):
    """What the kernels take for a pair of numbers of documents, or for None."""
    return (None, None) if documents is None else map(launch.contiguous, documents)


def flash_attention(q, k, v, causal, scale, documents=None, precision="ieee"):
    """(o, Kept((o, L))): q (batch, heads, time, size), k (batch, kv_heads, sources, size), v (batch, kv_heads, sources,
    out) of one dtype, sizes from 1 to 128; kv_heads divides heads.

    L is float32 (batch · heads, time), in powers of 2; -inf of a row that sees nothing, whose o is 0. documents: None,
    or two arrays of int64, (batch, time) and (batch, sources). precision: what float32 is multiplied in, "ieee" or
    "tf32".
    """
    q, k, v = map(_side_by_side, (q, k, v))
    batch, heads, times, _ = q.shape
    constants = _constants(q, v, causal, precision)
    out = _empty(q, v.shape[3], q)
    logs = launch.empty((batch * heads, times), np.float32, q)
    own, theirs = _documents(documents)
    numbers = heads, heads // k.shape[1], times, k.shape[2], scale, *_steps(q, k, v, out)

    def run(options):
        grid = (batch * heads * launch.cdiv(times, options["QUERIES"]),)
        FORWARD(grid, q, k, v, own, theirs, out, logs, *numbers, **constants, **options)
    run(best(FORWARD, _sizes(q, k, documents), q, run) or _blocks(FORWARD, q, v, documents))
    return out, Kept((out, logs))


def flash_attention_gradient(ct, q, k, v, causal, scale, kept, documents=None, precision="ieee"):
    """The cotangents of q, k and v; `kept` is what forward has kept."""
    ct, q, k, v = map(_side_by_side, (ct, q, k, v))
    (out, logs), (batch, heads, times, size) = kept, q.shape
    constants = _constants(q, v, causal, precision)
    gq, gk, gv = _empty(q, size, q), _empty(k, size, q), _empty(v, v.shape[3], q)
    deltas = launch.empty(logs.shape, np.float32, q)
    own, theirs = _documents(documents)
    numbers = heads, heads // k.shape[1], times, k.shape[2], scale
    sizes = _sizes(q, k, documents)

    def queries(options):
        grid = (batch * heads * launch.cdiv(times, options["QUERIES"]),)
        QUERIES(grid, ct, q, k, v, own, theirs, out, logs, deltas, gq, *numbers, *_steps(ct, q, k, v, out, gq),
                **constants, **options)

    def sources(options):
        grid = (batch * k.shape[1] * launch.cdiv(k.shape[2], options["SOURCES"]),)
        SOURCES(grid, ct, q, k, v, own, theirs, logs, deltas, gk, gv, *numbers, *_steps(ct, q, k, v, gk, gv),
                **constants, **options)
    queries(best(QUERIES, sizes, q, queries) or _blocks(QUERIES, q, v, documents))     # first: it makes the deltas
    sources(best(SOURCES, sizes, q, sources) or _blocks(SOURCES, q, v, documents))
    return gq, gk, gv


def attention(q, k, v, mask, documents, causal, scale):
    """The op's forward, without a mask."""
    return flash_attention(q, k, v, causal, scale, documents)


def attention_pullback(ct, wanted, q, k, v, documents, causal, scale, aux):
    """The op's pullback."""
    return flash_attention_gradient(ct, q, k, v, causal, scale, aux, documents)


def _fits(q, k, v, mask, documents, causal, scale):
    # Rows are counted in 32 bits, and a view of a row of features has longer rows than its own.
    return (mask is None and q.dtype == k.dtype == v.dtype and 1 <= q.shape[3] <= WIDEST and 1 <= v.shape[3] <= WIDEST
            and q.size > 0 and k.shape[2] > 0
            and all(x.shape[2] * max(x.strides[2] // x.itemsize, x.shape[3]) < 2 ** 31 for x in (q, k, v)))


OPS = {"attention": Op(attention, attention_pullback, _fits)}
