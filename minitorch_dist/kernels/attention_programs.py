"""Flash attention's programs for the GPU: forward, and backward's two. What they do, and why, and their definition in
NumPy are in flash_attention.py, which launches them.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
SCAN = tl.constexpr(1024)       # numbers of documents that are looked at at once


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
def _near(ahead, left, right):
    """Whether -left ≤ ahead ≤ right, by one comparison without signs; left + right ≥ 0."""
    return (ahead + left).to(tl.uint32) <= (left + right).to(tl.uint32)


@triton.jit
def _sees(t, s, sources, own, theirs, left, right, CAUSAL: tl.constexpr, BAND: tl.constexpr):
    """Which sources s positions t may look at: (t, s) bool. own: numbers of t's documents; theirs: where those of all
    sources are; or None."""
    sees = (t[:, None] >= 0) & (s < sources)[None, :]
    if CAUSAL:
        sees = sees & (s[None, :] <= t[:, None])
    if BAND:
        sees = sees & _near(s[None, :] - t[:, None], left, right)
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
def _common(begin, end, own, valid, theirs, limit, BAND: tl.constexpr, BLOCK: tl.constexpr):
    """(begin, end) of what is looked at where there are documents: of a band, what of it has numbers like one's own."""
    first, last = _stretch(own, valid, theirs, limit)
    first = first // BLOCK * BLOCK
    if BAND:
        first = tl.maximum(first, begin)
    return first, tl.minimum(end, last)


@triton.jit
def _reach(first, sources, left, right, CAUSAL: tl.constexpr, BAND: tl.constexpr, QUERIES: tl.constexpr,
           SOURCES: tl.constexpr):
    """(full, end) for the queries from `first` on: up to `full` they see whole blocks of sources, up to `end` any. Of a
    band they see nothing up to `full`."""
    full = sources
    end = sources
    if CAUSAL:
        full = tl.minimum(first + 1, sources)
        end = tl.minimum(first + QUERIES, sources)
    if BAND:
        full = tl.maximum(first - left, 0)
        end = tl.minimum(first + QUERIES + right, sources)
    return full // SOURCES * SOURCES, end


@triton.jit
def _attend(total, most, weight, q_tile, k, v, own, theirs, t, start, k_t, v_t, sources, left, right, scale,
            CAUSAL: tl.constexpr, BAND: tl.constexpr, EDGE: tl.constexpr, SIZE: tl.constexpr, OUT: tl.constexpr,
            WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, PRECISION: tl.constexpr, SOURCES: tl.constexpr):
    """One block of sources more. scale > 0: so it needn't be multiplied in before the maximum is known, and product and
    difference are one instruction."""
    s = start + tl.arange(0, SOURCES)
    k_tile = _rows(k, s, k_t, sources, SIZE, WIDTH, EDGE)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    if EDGE:
        scores = tl.where(_sees(t, s, sources, own, theirs, left, right, CAUSAL, BAND), scores, -float("inf"))
    larger = tl.maximum(most, tl.max(scores, axis=1) * scale)
    base = larger
    if BAND or theirs is not None:
        base = tl.where(larger == -float("inf"), 0.0, larger)       # of rows that have seen nothing yet
    p = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(most - base)
    v_tile = _rows(v, s, v_t, sources, OUT, OUT_WIDTH, EDGE)
    total = tl.dot(p.to(v_tile.dtype), v_tile, total * shrink[:, None], input_precision=PRECISION)
    return total, larger, weight * shrink + tl.sum(p, axis=1)


@triton.jit
def forward_program(q, k, v, documents, theirs, out, logs, heads, share, times, sources, left, right, scale, q_b, q_h,
                    q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, CAUSAL: tl.constexpr, BAND: tl.constexpr,
                    SIZE: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr,
                    PRECISION: tl.constexpr, QUERIES: tl.constexpr, SOURCES: tl.constexpr):
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
    full, end = _reach(first, sources, left, right, CAUSAL, BAND, QUERIES, SOURCES)
    if documents is not None:
        own = _numbers(documents + batch.to(tl.int64) * times, t, times)
        theirs = theirs + batch.to(tl.int64) * sources
        full, end = _common(full, end, own, t < times, theirs, sources, BAND, SOURCES)
    elif not BAND:
        for start in range(0, full, SOURCES):
            total, most, weight = _attend(total, most, weight, q_tile, k, v, None, None, t, start, k_t, v_t, sources,
                                          left, right, scale, CAUSAL, False, False, SIZE, OUT, WIDTH, OUT_WIDTH,
                                          PRECISION, SOURCES)
    for start in range(full, end, SOURCES):
        total, most, weight = _attend(total, most, weight, q_tile, k, v, own, theirs, t, start, k_t, v_t, sources,
                                      left, right, scale, CAUSAL, BAND, True, SIZE, OUT, WIDTH, OUT_WIDTH, PRECISION,
                                      SOURCES)
    if BAND or documents is not None:
        weight = tl.where(most == -float("inf"), 1.0, weight)       # rows that see nothing give 0
    _store_rows(out + batch * o_b + head * o_h, t, o_t, times, total / weight[:, None], OUT, OUT_WIDTH)
    tl.store(logs + one.to(tl.int64) * times + t, most + tl.log2(weight), mask=t < times)


@triton.jit
def _pull_queries(total, q_tile, c_tile, log, delta, k, v, own, theirs, t, start, k_t, v_t, sources, left, right, scale,
                  CAUSAL: tl.constexpr, BAND: tl.constexpr, EDGE: tl.constexpr, SIZE: tl.constexpr, OUT: tl.constexpr,
                  WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, PRECISION: tl.constexpr, SOURCES: tl.constexpr):
    """What one block of sources adds to q̄."""
    s = start + tl.arange(0, SOURCES)
    k_tile = _rows(k, s, k_t, sources, SIZE, WIDTH, EDGE)
    v_tile = _rows(v, s, v_t, sources, OUT, OUT_WIDTH, EDGE)
    p = tl.exp2(tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale - log[:, None])
    if EDGE:
        p = tl.where(_sees(t, s, sources, own, theirs, left, right, CAUSAL, BAND), p, 0.0)
    g = p * (tl.dot(c_tile, tl.trans(v_tile), input_precision=PRECISION) - delta[:, None])
    return tl.dot(g.to(k_tile.dtype), k_tile, total, input_precision=PRECISION)


@triton.jit
def queries_program(ct, q, k, v, documents, theirs, out, logs, deltas, gq, heads, share, times, sources, left, right,
                    scale, c_b, c_h, c_t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t, gq_b, gq_h, gq_t,
                    CAUSAL: tl.constexpr, BAND: tl.constexpr, SIZE: tl.constexpr, OUT: tl.constexpr,
                    WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr,
                    SOURCES: tl.constexpr):
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
    full, end = _reach(first, sources, left, right, CAUSAL, BAND, QUERIES, SOURCES)
    if documents is not None:
        own = _numbers(documents + batch.to(tl.int64) * times, t, times)
        theirs = theirs + batch.to(tl.int64) * sources
        full, end = _common(full, end, own, t < times, theirs, sources, BAND, SOURCES)
    elif not BAND:
        for start in range(0, full, SOURCES):
            total = _pull_queries(total, q_tile, c_tile, log, delta, k, v, None, None, t, start, k_t, v_t, sources,
                                  left, right, scale2, CAUSAL, False, False, SIZE, OUT, WIDTH, OUT_WIDTH, PRECISION,
                                  SOURCES)
    for start in range(full, end, SOURCES):
        total = _pull_queries(total, q_tile, c_tile, log, delta, k, v, own, theirs, t, start, k_t, v_t, sources, left,
                              right, scale2, CAUSAL, BAND, True, SIZE, OUT, WIDTH, OUT_WIDTH, PRECISION, SOURCES)
    _store_rows(gq + batch * gq_b + head * gq_h, t, gq_t, times, total * scale, SIZE, WIDTH)


@triton.jit
def _pull_sources(k_total, v_total, k_tile, v_tile, ct, q, documents, own, logs, deltas, s, start, c_t, q_t, times,
                  left, right, scale, EDGE: tl.constexpr, BAND: tl.constexpr, SIZE: tl.constexpr, OUT: tl.constexpr,
                  WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr):
    """What one block of queries adds to k̄ and v̄. Scores are transposed here: (sources, queries)."""
    t = start + tl.arange(0, QUERIES)
    q_tile = _rows(q, t, q_t, times, SIZE, WIDTH, True)
    c_tile = _rows(ct, t, c_t, times, OUT, OUT_WIDTH, True)
    log = tl.load(logs + t, mask=t < times, other=float("inf"))      # queries behind the last have p = 0
    delta = tl.load(deltas + t, mask=t < times, other=0.0)
    p = tl.exp2(tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * scale - log[None, :])
    if EDGE:
        p = tl.where(s[:, None] <= t[None, :], p, 0.0)
    if BAND:
        p = tl.where(_near(s[:, None] - t[None, :], left, right), p, 0.0)
    if documents is not None:
        p = tl.where(own[:, None] == _numbers(documents, t, times)[None, :], p, 0.0)
    v_total = tl.dot(p.to(c_tile.dtype), c_tile, v_total, input_precision=PRECISION)
    g = p * (tl.dot(v_tile, tl.trans(c_tile), input_precision=PRECISION) - delta[None, :])
    return tl.dot(g.to(q_tile.dtype), q_tile, k_total, input_precision=PRECISION), v_total


@triton.jit
def sources_program(ct, q, k, v, documents, theirs, logs, deltas, gk, gv, heads, share, times, sources, left, right,
                    scale, c_b, c_h, c_t, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, gk_b, gk_h, gk_t, gv_b, gv_h,
                    gv_t, CAUSAL: tl.constexpr, BAND: tl.constexpr, SIZE: tl.constexpr, OUT: tl.constexpr,
                    WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr,
                    SOURCES: tl.constexpr):
    blocks = tl.cdiv(sources, SOURCES)
    one = tl.program_id(0) // blocks
    kv_heads = heads // share
    batch, kv_head = one // kv_heads, one % kv_heads
    first = tl.program_id(0) % blocks * SOURCES
    s = first + tl.arange(0, SOURCES)
    k_tile = _rows(k + batch * k_b + kv_head * k_h, s, k_t, sources, SIZE, WIDTH, True)
    v_tile = _rows(v + batch * v_b + kv_head * v_h, s, v_t, sources, OUT, OUT_WIDTH, True)

    # Causal: queries before `begin` see nothing of this block, those from `full` on all of it. Of a band, nothing too.
    begin = 0
    full = 0
    if CAUSAL:
        begin = first // QUERIES * QUERIES
        full = tl.cdiv(first + SOURCES - 1, QUERIES) * QUERIES
    if BAND:
        begin = tl.maximum(first - right, 0) // QUERIES * QUERIES
        full = tl.minimum(first + SOURCES + left, times)
    own = theirs
    if documents is not None:       # all is looked at one by one, from `begin` to `full`
        own = _numbers(theirs + batch.to(tl.int64) * sources, s, sources)
        documents = documents + batch.to(tl.int64) * times
        near, last = _stretch(own, s < sources, documents, times)
        begin = tl.maximum(begin, near // QUERIES * QUERIES)
        if BAND:
            last = tl.minimum(last, full)
        full = last
    k_total = tl.zeros((SOURCES, WIDTH), tl.float32)
    v_total = tl.zeros((SOURCES, OUT_WIDTH), tl.float32)
    for member in range(0, share):
        head = kv_head * share + member
        c_at, q_at = ct + batch * c_b + head * c_h, q + batch * q_b + head * q_h
        row = (batch * heads + head).to(tl.int64) * times
        logs_at, deltas_at = logs + row, deltas + row
        for start in range(begin, tl.minimum(full, times), QUERIES):
            k_total, v_total = _pull_sources(k_total, v_total, k_tile, v_tile, c_at, q_at, documents, own, logs_at,
                                             deltas_at, s, start, c_t, q_t, times, left, right, scale * LOG2_E, CAUSAL,
                                             BAND, SIZE, OUT, WIDTH, OUT_WIDTH, PRECISION, QUERIES)
        if documents is None and not BAND:
            for start in range(full, times, QUERIES):
                k_total, v_total = _pull_sources(k_total, v_total, k_tile, v_tile, c_at, q_at, None, None, logs_at,
                                                 deltas_at, s, start, c_t, q_t, times, left, right, scale * LOG2_E,
                                                 False, False, SIZE, OUT, WIDTH, OUT_WIDTH, PRECISION, QUERIES)
    _store_rows(gk + batch * gk_b + kv_head * gk_h, s, gk_t, sources, k_total * scale, SIZE, WIDTH)
    _store_rows(gv + batch * gv_b + kv_head * gv_h, s, gv_t, sources, v_total, OUT, OUT_WIDTH)
