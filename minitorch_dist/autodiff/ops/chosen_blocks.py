"""Attention to a few blocks of the sources, which each query chooses: its own block up to itself, and of those before
the ones whose mean key agrees with it most, by q · mean(k).

    3 blocks of 4        sources  0 1 2 3 │ 4 5 6 7 │ 8 9 … │ … 15 │ 16 …
    query 6                       ■ ■ ■ ■   ■ ■ ■
    query 17                      ■ ■ ■ ■             ■ ■ ■ ■         ■ ■         it chose the blocks of 0 and 8
    query 18                                ■ ■ ■ ■   ■ ■ ■ ■         ■ ■ ■       and this one others

A query makes count · size scores, however long the sequence, and may still look at any place, key by key; choosing
takes one more score per block. It is a mixture of blocks: queries go to blocks as tokens to experts, sorted by block
and multiplied block by block (grouped.py).

    pairs (query, block), by query     17:4 17:0 17:2 18:4 18:1 18:2 …
    the same, by block                 17:0 … │ 18:1 … │ 17:2 18:2 … │ …        one product with the keys of each block

The choice has no derivative: what makes a block's mean key agree is learned by its keys, as far as they are looked at.
Source: Lu et al. 2025, "MoBA: mixture of block attention for long-context LLMs".
"""

import math

from ... import backend
from ...backend import argsort, finfo, module_of, number, on_host, result_type, to_float32, whole, xp
from ..primitive import Primitive, bind, lower, rounded_once
from .arrange import pad
from .attention import banded_attention, grouped, scaled_early
from .elementwise import floats, mul, where
from .fused import as_op, softmax
from .grouped import grouped_matmul, grouped_outer_products, grouped_products
from .reduction import sum as add_up
from .shape import reshape, swap_last

AT_A_TIME = 2 ** 20     # weights that are made at a time on the host: what is made of them is in a cache still


def means_of(k, size):
    """The mean key of each whole block, of an array (batch, kv_heads, sources, features): (batch, kv_heads, blocks,
    features)."""
    batch, heads, sources, features = k.shape
    blocks = sources // size
    return k[:, :, :blocks * size].reshape(batch, heads, blocks, size, features).mean(3)


def choices(q, means, sources, size, count):
    """(the numbers of the blocks that each query looks at, its own first; whether it does): int64 and bool (batch,
    heads, time, count). Where a query has fewer blocks before it, the number is that of the first.

    q      (batch, heads, time, features): an array of the last queries of so many sources
    means  (batch, kv_heads, blocks, features) of blocks that are whole, at least all those before a query's own
    """
    q, means = (to_float32(x) if x.itemsize == 2 else x for x in (q, means))        # on a GPU, where they aren't yet
    times, block = q.shape[2], xp.arange(means.shape[2], like=q)
    own = xp.arange(sources - times, sources, like=q) // size
    scores = backend.matmul(grouped(q, means.shape[1]), means.swapaxes(2, 3)).reshape(*q.shape[:3], len(block))
    scores = xp.where(block < own[:, None], xp.maximum(scores, finfo(scores.dtype).min), -xp.inf)
    chosen, flat = [xp.broadcast_to(own, q.shape[:3])], scores.reshape(-1, scores.shape[3])
    for _ in range(min(count - 1, len(block))):     # a few times the largest is less work than an order of all
        chosen.append(scores.argmax(3))
        flat[xp.arange(len(flat), like=flat), chosen[-1].reshape(-1)] = -xp.inf
    seen = xp.arange(len(chosen), like=q) <= own[:, None]
    return xp.stack(chosen, 3), xp.broadcast_to(seen, (*q.shape[:3], len(chosen)))


def _by_block(chosen, groups, blocks):
    """int64: (all P pairs of a query and a block, (P,), by block; the inverse of this order; where the pairs of each of
    the batch · groups · blocks blocks end)."""
    batch, heads, *_ = chosen.shape
    group = xp.arange(batch, like=chosen)[:, None] * groups + xp.arange(heads, like=chosen) // (heads // groups)
    block = (group[:, :, None, None] * blocks + chosen).reshape(-1)
    order = argsort(block, 0)
    inverse = xp.empty_like(order)
    inverse[order] = xp.arange(len(order), like=order)
    return order, inverse, xp.searchsorted(block[order], xp.arange(batch * groups * blocks, like=block), side="right")


def _counts(ends):
    """How many pairs each block has, as Python's integers. (On a GPU this waits for them.)"""
    ends = ends.tolist()
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _filled(x, size):
    """An array (batch, kv_heads, sources, features) with 0 behind the last source, up to whole blocks."""
    batch, heads, sources, features = x.shape
    if not (missing := -sources % size):
        return x
    out = module_of(x).zeros((batch, heads, sources + missing, features), x.dtype)
    out[:, :, :sources] = x
    return out


def _blocks(x, size):
    """An array of whole blocks as (batch · kv_heads · blocks, size, features)."""
    batch, heads, sources, features = x.shape
    return x.reshape(batch * heads * (sources // size), size, features)


def _scores(q, k, means, sources, size, count, scale):
    """((P, size) of all P pairs, by block, -inf where nothing is seen; what _by_block says; _counts of it)."""
    batch, heads, times, features = q.shape
    chosen, seen = choices(q, means, sources, size, count)
    order, inverse, ends = _by_block(chosen, k.shape[1], k.shape[2] // size)
    q, scale = scaled_early(q, scale)
    counts, rows = _counts(ends), q.reshape(batch * heads * times, features)[order // count]
    p = grouped_products(rows, _blocks(k, size).swapaxes(1, 2), counts)
    p *= scale
    own, place = inverse[::count], xp.arange(sources - times, sources, like=order) % size
    later = (xp.arange(size, like=order) > place[:, None])[None]
    p[own] = xp.where(later, -xp.inf, p[own].reshape(batch * heads, times, size)).reshape(len(own), size)
    xp.copyto(p, -xp.inf, where=~seen.reshape(-1)[order][:, None])
    return p, order, inverse, ends, counts


def attend_to_blocks(q, k, v, means, sources, size, count, scale):
    """(block_attention of arrays, what backward keeps).

    k, v   keys and values of whole blocks, of which the first `sources` positions count: behind them there is no NaN
    means  of the whole blocks among these positions
    """
    p, order, inverse, ends, counts = _scores(q, k, means, sources, size, count, scale)
    top = p.max(1)[inverse].reshape(-1, count).max(1)
    p -= top[order // count][:, None]
    xp.exp(p, out=p)
    p /= _over_pairs(backend.add_up(p, 1), order, inverse, count)[:, None]
    y = grouped_products(p, _blocks(v, size), counts)[inverse].reshape(*q.shape[:3], count, v.shape[3])
    return backend.add_up(y, 3), (p, order, inverse, ends)       # arrays: a compiled function makes them anew


def _over_pairs(x, order, inverse, count):
    """Of a number of each pair, by block, the sum over its query's pairs."""
    return backend.add_up(x[inverse].reshape(-1, count), 1)[order // count]


def _apart(x, groups):
    """An array (batch, heads, …) with what shares keys in a row: (batch · groups, heads / groups, …)."""
    batch, heads, *rest = x.shape
    return x.reshape(batch * groups, heads // groups, *rest)


def _together(q, k, size, count):
    """[slice] of the batch · kv_heads rows of _apart that are computed at a time: on a GPU all of them."""
    rows, (_, heads, times, _) = k.shape[0] * k.shape[1], q.shape
    some = max(1, AT_A_TIME // max(1, heads // k.shape[1] * times * count * size)) if on_host(q) else max(1, rows)
    return [slice(start, start + some) for start in range(0, rows, some)]


def _forward(q, *args):
    return as_op(_made, q, *args)


def _made(q, k, v, size, count, scale):
    together, shape, groups = _together(q, k, size, count), (*q.shape[:3], v.shape[3]), k.shape[1]
    q, k, v = (_apart(x, groups) for x in (q, k, v))
    y, kept = module_of(q).empty((*q.shape[:3], v.shape[3]), result_type(q, k, v)), []
    for part in together:
        keys, values = _filled(k[part], size), _filled(v[part], size)
        y[part], aux = attend_to_blocks(q[part], keys, values, means_of(k[part], size), k.shape[2], size, count, scale)
        kept += aux
    return y.reshape(shape), tuple(kept)


def _pullback(ct, wanted, q, k, v, size, count, scale, aux):
    rounded = bool(aux) and aux[0].itemsize == 2

    def slopes(ct, q, k, v, aux):
        return _slopes(ct, wanted, q, k, v, size, count, scale, aux, rounded)
    return as_op(slopes, ct, q, k, v, aux)


def _slopes(ct, wanted, q, k, v, size, count, scale, aux, rounded):
    together, shapes, groups = _together(q, k, size, count), (q.shape, k.shape, v.shape), k.shape[1]
    ct, q, k, v = (_apart(x, groups) for x in (ct, q, k, v))
    found = [module_of(x).empty(x.shape, result_type(ct, x)) if some else None
             for x, some in zip((q, k, v), wanted, strict=True)]
    for i, part in enumerate(together):
        for out, g in zip(found, _gradients(ct[part], wanted, q[part], k[part], v[part], size, count, scale,
                                            aux[4 * i:4 * i + 4], rounded), strict=True):
            if g is not None:
                out[part] = g
    return tuple(g if g is None else g.reshape(shape) for g, shape in zip(found, shapes, strict=True))


def _gradients(ct, wanted, q, k, v, size, count, scale, aux, rounded):
    p, order, inverse, ends = aux
    if rounded:     # as in attention._attend_pullback; a query sees itself at least
        p = p / _over_pairs(backend.add_up(p, 1), order, inverse, count)[:, None]
    batch, heads, times, features = q.shape
    query, counts = order // count, _counts(ends)
    g = ct.reshape(batch * heads * times, ct.shape[3])[query]
    gq = gk = gv = None
    if wanted[0] or wanted[1]:
        scores = grouped_products(g, _blocks(_filled(v, size), size).swapaxes(1, 2), counts)
        scores -= _over_pairs(backend.add_up(scores * p, 1), order, inverse, count)[:, None]
        scores *= p
        scores *= scale
        if wanted[0]:
            gq = grouped_products(scores, _blocks(_filled(k, size), size), counts)[inverse]
            gq = backend.add_up(gq.reshape(batch, heads, times, count, features), 3)
        if wanted[1]:
            rows = q.reshape(batch * heads * times, features)[query]
            gk = _of_sources(grouped_outer_products(scores, rows, counts), k)
    if wanted[2]:
        gv = _of_sources(grouped_outer_products(p, g, counts), v)
    return gq, gk, gv


def _of_sources(blocks, x):
    """Blocks (batch · kv_heads · blocks, size, features) as the sources, of x's shape, that they were made of."""
    batch, heads, sources, features = x.shape
    rows = len(blocks) * blocks.shape[1] // max(1, batch * heads)
    return blocks.reshape(batch, heads, rows, features)[:, :, :sources]


def _definition(q, k, v, size, count, scale):
    """In ordinary ops."""
    (batch, heads, times, features), (_, groups, sources, _) = q.shape, k.shape
    chosen, seen = choices(lower(q), means_of(lower(k), size), sources, size, count)
    blocks = -(-sources // size)
    order, inverse, ends = _by_block(chosen, groups, blocks)
    counts = _counts(ends)
    k, v = (reshape(pad(x, [(0, 0), (0, 0), (0, blocks * size - sources), (0, 0)]),
                    (batch * groups * blocks, size, x.shape[3])) for x in (k, v))
    rows = reshape(q, (batch * heads * times, features))[order // count]
    scores = mul(grouped_matmul(rows, swap_last(k), counts), scale)[inverse]
    there = chosen[..., None] * size + xp.arange(size, like=chosen)
    here = xp.arange(sources - times, sources, like=chosen)
    mask = (seen[..., None] & (there <= here[:, None, None])).reshape(batch, heads, times, count * size)
    scores = where(mask, reshape(scores, mask.shape), float(finfo(scores.dtype).min) / 2)
    p = reshape(softmax(scores), (batch * heads * times * count, size))[order]
    y = grouped_matmul(p, v, counts)[inverse]
    return add_up(reshape(y, (batch, heads, times, count, v.shape[2])), 3)


_block_attention = Primitive("block_attention", _forward, "q k v", "size count scale", aux=True, own_sums=True,
                             definition=rounded_once(_definition, 3), pullback=_pullback)


def _greatest(q, k, size, count, scale):
    kind = xp.promote_types(result_type(q, k), xp.float32)
    q, k, count = q.astype(kind, copy=False), k.astype(kind, copy=False), min(count, k.shape[2] // size + 1)
    p, _, inverse, *_ = _scores(q, _filled(k, size), means_of(k, size), k.shape[2], size, count, scale)
    batch, heads, times, _ = q.shape
    if not batch * times:
        return module_of(q).full(heads, -xp.inf, kind)
    return p.max(1)[inverse].reshape(batch, heads, times * count).max((0, 2))


_greatest_scores = Primitive("greatest_block_scores", _greatest, "q k", "size count scale")


def greatest_block_scores(query, key, size, count, scale):
    """Of each head the greatest of the scores that block_attention looks at, with the same arguments (not checked
    here): (heads,), float32 at least; constants."""
    return bind(_greatest_scores, (query, key), (size, count, number(scale)))


def block_attention(query, key, value, size, count, scale=None):
    """softmax(query keyᵀ · scale) value, head by head, of the sources up to each query's own that lie in its own block
    or in one of count - 1 before that it chooses (above); of keys that several heads share each head chooses by itself.

    query  (batch, heads, time, features), of the last positions of the sources
    key    (batch, kv_heads, sources, features); kv_heads divides heads
    value  (batch, kv_heads, sources, out) -> (batch, heads, time, out)
    size   sources in a block
    count  blocks that a query looks at, its own among them; where they are all there are it is causal attention
    scale  default 1 / sqrt(features)

    Among blocks that agree equally the earlier is chosen. Backward keeps count · size weights per query and head.
    ValueError where shapes don't fit, there are more queries than sources, or size or count is below 1.
    """
    query, key, value = floats(query), floats(key), floats(value)
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) == 4 or not q[0] == k[0] == v[0] or k[:3] != v[:3] or q[3] != k[3] \
            or not k[1] or q[1] % k[1] or q[2] > k[2]:
        raise ValueError(f"block_attention: query {q}, key {k}, value {v} must be (batch, heads, time, features), "
                         "(batch, kv_heads, sources, features) and (batch, kv_heads, sources, out), kv_heads a divisor "
                         "of heads, and as many sources as queries or more")
    size, count = whole("size", size), whole("count", count)
    if min(size, count) < 1:
        raise ValueError(f"block_attention: size={size}, count={count} must be 1 or more: a query sees its own block")
    scale = 1 / math.sqrt(q[3]) if scale is None else number(scale)
    if count >= -(-k[2] // size):
        return banded_attention(query, key, value, (None, k[2] - q[2]), scale)
    return bind(_block_attention, (query, key, value), (size, count, scale))
