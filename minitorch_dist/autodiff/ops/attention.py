"""Scaled dot-product attention, fused.

Which sources a position may look at by its place is a band, (left, right): position t sees s where
t - left ≤ s ≤ t + right; None: as far as there are any.

    all                     (None, None)
    causal                  (None, 0)
    window w                (w - 1, w - 1)          positions less than w away
    causal, window w        (w - 1, 0)

Of a narrow band the scores outside are not even made: some queries at a time look at what the band has of the sources.

    w = 3, causal     sources  0 1 2 3 4 5 6 7 8
    queries 0 1 2              ■ ■ ■
    queries 3 4 5                ■ ■ ■ ■ ■
    queries 6 7 8                      ■ ■ ■ ■ ■        (by three; really by 64 or more)

Sources: Vaswani et al. 2017; grouped heads: Ainslie et al. 2023; windows: Beltagy et al. 2020, "Longformer"; Jiang et
al. 2023, "Mistral 7B".
"""

import functools
import math
import operator

from ... import backend
from ...backend import (
    check_devices,
    device_of,
    finfo,
    is_bfloat16,
    is_floating,
    is_short,
    module_of,
    number,
    result_type,
    whole,
    xp,
)
from ..primitive import TRACED, Primitive, bind, lower, rounded_once, state
from .elementwise import astype, floats, greater, mul, where, wide
from .fused import as_op, softmax
from .indexing import numbers_in
from .linalg import matmul
from .random import dropout
from .reduction import broadcast_to
from .shape import concatenate, reshape, swap_last

ALL, CAUSAL = (None, None), (None, 0)
FEWEST = 64         # queries at a time: fewer would be more calls of NumPy than work
AT_ONCE = 1 << 20   # scores that are made only to be looked at


def band_of(is_causal, window):
    """The band of these arguments. ValueError for a window of less than 1, TypeError where it is no integer."""
    if window is None:
        return CAUSAL if is_causal else ALL
    if (width := whole("window", window)) < 1:
        raise ValueError(f"attention: window={window} must be 1 or more: a position sees those less than so many away, "
                         "itself among them")
    return width - 1, 0 if is_causal else width - 1


def part_of_band(band, queries, sources):
    """The band between two slices of the positions, counted in each from its first: without a bound that leaves nothing
    out there. None where nothing is seen."""
    ahead, times, width = queries.start - sources.start, queries.stop - queries.start, sources.stop - sources.start
    left, right = band
    left, right = (None if left is None else left - ahead), (None if right is None else right + ahead)
    if left is not None and -left >= width or right is not None and -right >= times:
        return None
    if left is not None and left >= times - 1:
        left = None
    if right is not None and right >= width - 1:
        right = None
    return left, right


def pieces(times, sources, band):
    """[(queries, sources, band)]: slices that have all that a narrow band lets be seen, and the band in them; [] where
    all at once is as little."""
    left, right = band
    if left is None or right is None:
        return []
    size = max(FEWEST, left + right + 1)
    return [] if size + left + right >= sources else strips(times, sources, band, size)


def strips(times, sources, band, size):
    """[(queries, sources, band)]: `size` queries at a time, with all that the band lets them see, and the band in
    there."""
    left, right = band
    cut = [(slice(first, min(first + size, times)),
            slice(0 if left is None else max(0, first - left),
                  sources if right is None else max(0, min(first + size + right, sources))))
           for first in range(0, times, size)]
    return [(rows, columns, part_of_band(band, rows, columns)) for rows, columns in cut if columns.start < columns.stop]


def allowed(q, k, mask, documents, band):
    """Which sources each position may look at, broadcasting to (batch, heads, time, sources); None: all.

    documents  None, or a pair: the numbers of the queries' documents (batch, time), of the sources' (batch, sources)
    band       see above; ends may be negative, between parts of a sequence
    """
    rules = [] if mask is None else [mask]
    if documents is not None:
        here, there = documents
        rules.append(here[:, None, :, None] == there[:, None, None, :])
    left, right = band
    tri = functools.partial(module_of(lower(q)).tri, q.shape[2], k.shape[2], dtype=bool)
    if right is not None:
        rules.append(tri(k=right))
    if left is not None:
        rules.append(~tri(k=-left - 1))
    return functools.reduce(operator.and_, rules) if rules else None


def _definition(q, k, v, mask, documents, band, scale, bias=None, dropped=None, sinks=None):
    """In ordinary ops; bias: None, or what is added to the scores; dropped: None, or a function that drops weights;
    sinks: None, or a score per head of what is no source."""
    mask = allowed(q, k, mask, documents, band)
    batch, heads, times, size = q.shape
    groups = k.shape[1]
    share = (batch, groups, heads // groups)
    k, v = (reshape(x, (batch, groups, 1, *x.shape[2:])) for x in (k, v))
    q = reshape(q, (*share, times, size))
    if is_short(q.dtype) or state.autocast is not None:     # what isn't scaled yet may be beyond float16's range
        scores = matmul(mul(q, scale), swap_last(k))
    else:
        scores = mul(matmul(q, swap_last(k)), scale)        # which keeps no scaled queries for backward
    scores = reshape(scores, (batch, heads, *scores.shape[3:]))
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = where(mask, scores, float(finfo(scores.dtype).min) / 2)
    if sinks is None:
        p = softmax(scores)
    else:
        column = broadcast_to(reshape(sinks, (1, heads, 1, 1)), (batch, heads, times, 1))
        p = softmax(concatenate([scores, column], 3))[..., :-1]
    if mask is not None:
        p = where(mask, p, 0.0)         # a row that may see nothing gives 0
    p = p if dropped is None else dropped(p)
    return reshape(matmul(reshape(p, (*share, *p.shape[2:])), v), (batch, heads, times, v.shape[-1]))


def grouped(x, groups):
    """The heads that share keys and values as more rows of one matrix."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups * x.shape[2], x.shape[3])


def scaled_early(q, scale):
    """(q · scale, 1.0) of an array of 16 bits, as they are on a GPU: see _definition. Of others (q, scale)."""
    return (q * scale, 1.0) if q.itemsize == 2 else (q, scale)


def masked_scores(q, k, mask, scale):
    """q kᵀ · scale of arrays, -inf where the mask is False: (batch, heads, time, sources)."""
    q, scale = scaled_early(q, scale)
    p = backend.matmul(grouped(q, k.shape[1]), k.swapaxes(2, 3)).reshape(*q.shape[:3], k.shape[2])
    p *= scale
    if mask is not None:
        xp.copyto(p, -xp.inf, where=xp.logical_not(mask))
    return p


def _attend(q, k, v, mask, documents, band, scale):
    """(what is made of all scores at once, their weights)."""
    p = masked_scores(q, k, allowed(q, k, mask, documents, band), scale)
    # Where all is masked the maximum is -inf and the sum 0: with these bounds the row becomes 0, not NaN.
    if p.size:      # a row of no source at all has no maximum, and needs none
        p -= xp.maximum(p.max(axis=-1, keepdims=True), finfo(p.dtype).min)
    xp.exp(p, out=p)
    p /= xp.maximum(backend.add_up(p, -1, True), 1)
    return backend.matmul(grouped(p, k.shape[1]), v).reshape(*q.shape[:3], v.shape[-1]), p


def _forward(q, *args):
    return as_op(_made, q, *args)


def _made(q, k, v, mask, documents, band, scale):
    cut = pieces(q.shape[2], k.shape[2], band) if mask is None else []
    if not cut:
        return _attend(q, k, v, mask, documents, band, scale)
    make, widest = module_of(q), max(columns.stop - columns.start for _, columns, _ in cut)
    y = make.zeros((*q.shape[:3], v.shape[3]), result_type(q, k, v))
    p = make.empty((*q.shape[:3], widest), result_type(q, k))
    for rows, columns, part in cut:
        numbers, width = documents and (documents[0][:, rows], documents[1][:, columns]), columns.stop - columns.start
        y[:, :, rows], p[:, :, rows, :width] = _attend(
            q[:, :, rows], k[:, :, columns], v[:, :, columns], None, numbers, part, scale)
        p[:, :, rows, width:] = 0       # nobody reads it, but a rounding to 16 bits would warn of what is no number
    return y, p


def _pullback(ct, wanted, q, k, v, band, scale, aux):
    rounded = aux.itemsize == 2

    def slopes(ct, q, k, v, p):
        return _slopes(ct, wanted, q, k, v, band, scale, p, rounded)
    return as_op(slopes, ct, q, k, v, aux)


def _slopes(ct, wanted, q, k, v, band, scale, aux, rounded):
    cut = pieces(q.shape[2], k.shape[2], band) if aux.shape[3] != k.shape[2] else []
    if not cut:
        return _attend_pullback(ct, wanted, q, k, v, scale, aux, rounded)
    gs = [module_of(x).zeros_like(x) if w else None for x, w in zip((q, k, v), wanted, strict=True)]
    for rows, columns, _ in cut:
        p = aux[:, :, rows, :columns.stop - columns.start]
        parts = _attend_pullback(ct[:, :, rows], wanted, q[:, :, rows], k[:, :, columns], v[:, :, columns], scale, p,
                                 rounded)
        for total, at, part in zip(gs, (rows, columns, columns), parts, strict=True):
            if total is not None:
                total[:, :, at] += part
    return tuple(gs)


def _attend_pullback(ct, wanted, q, k, v, scale, p, rounded):
    # A masked place has p = 0, so that its score gets no cotangent: the mask itself isn't needed.
    if rounded:     # to 16 bits: only of weights that add up to 1 is what all values have in common gone from `scores`
        p = p / xp.maximum(backend.add_up(p, -1, True), finfo(p.dtype).tiny)
    groups = k.shape[1]
    g, p = grouped(ct, groups), grouped(p, groups)
    gq = gk = None
    if wanted[0] or wanted[1]:
        scores = backend.matmul(g, v.swapaxes(2, 3))
        scores -= backend.add_up(scores * p, -1, True)
        scores *= p
        scores *= scale
        gq = backend.matmul(scores, k).reshape(q.shape) if wanted[0] else None
        gk = backend.matmul(scores.swapaxes(2, 3), grouped(q, groups)) if wanted[1] else None
    return gq, gk, backend.matmul(p.swapaxes(2, 3), g) if wanted[2] else None


_attention = Primitive("attention", _forward, "q k v", "mask documents band scale", aux=True, own_sums=True,
                       definition=rounded_once(_definition, 3), pullback=_pullback)


def greatest_in(q, k, mask, documents, band, scale):
    """greatest_scores of arrays, some queries at a time."""
    (batch, heads, times, _), sources = q.shape, k.shape[2]
    kind = xp.promote_types(result_type(q, k), xp.float32)
    found = module_of(q).full(heads, -xp.inf, kind)
    mask = None if mask is None else xp.broadcast_to(mask, (batch, heads, times, sources))
    size = max(FEWEST, AT_ONCE // max(1, batch * heads * sources))
    for rows, columns, part in strips(times, sources, band, size) if batch else ():
        numbers = documents and (documents[0][:, rows], documents[1][:, columns])
        q_here, k_here = (x.astype(kind, copy=False) for x in (q[:, :, rows], k[:, :, columns]))
        seen = allowed(q_here, k_here, None if mask is None else mask[:, :, rows, columns], numbers, part)
        xp.maximum(found, masked_scores(q_here, k_here, seen, scale).max(axis=(0, 2, 3)), out=found)
    return found


_greatest_scores = Primitive("greatest_scores", greatest_in, "q k", "mask documents band scale")


def greatest_scores(query, key, attn_mask=None, is_causal=False, scale=None, documents=None, window=None):
    """Of each head the greatest of the scores that scaled_dot_product_attention looks at, with the same arguments (not
    checked here): (heads,), float32 at least; constants. -inf of a head that looks at nothing. What floats as attn_mask
    add is left out."""
    mask, _ = _mask_and_bias(attn_mask, query, (*query.shape[:3], key.shape[2]))
    documents = documents if documents is None else (numbered(documents, (query.shape[0], query.shape[2])),) * 2
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else number(scale)
    return bind(_greatest_scores, (query, key), (mask, documents, band_of(is_causal, window), scale))


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                                 documents=None, window=None, sinks=None):
    """softmax(query keyᵀ · scale) value, head by head.

    query      (batch, heads, time, size)
    key        (batch, kv_heads, sources, size); kv_heads divides heads: head h reads key h // (heads / kv_heads)
    value      (batch, kv_heads, sources, out) -> (batch, heads, time, out)
    attn_mask  broadcasts to (batch, heads, time, sources). bool: True where a position may look. Floats: added to the
               scores, and differentiated; -inf forbids
    dropout_p  probability to drop a weight, whether one trains or not: ops.dropout, by the library's streams. Or what
               drops weights, as an nn.Dropout
    is_causal  position t may look at sources 0 … t
    scale      default 1 / sqrt(size); a number, or a tensor that broadcasts to (batch, heads, time, 1), which gets a
               gradient
    documents  integers (batch, time), for self-attention: a position may look at those of its own number, which need
               not stand side by side. Source: Dubey et al. 2024, "The Llama 3 herd of models", 3.2
    window     a position sees those less than so many away only, itself among them: with is_causal t - window + 1 … t
    sinks      (heads,): a score of each head for what is no source, in the sum that weights are divided by, so that
               they come to less than 1 and a head may look away. Sources: Xiao et al. 2023, "Efficient streaming
               language models with attention sinks"; OpenAI 2025, "gpt-oss" (as here)

    What attn_mask, is_causal, documents and window forbid adds up (torch takes no attn_mask beside is_causal); a
    position that may look at nothing gives 0. torch asks for enable_gqa=True before it groups heads; here the shapes
    say it. Backward keeps the (batch, heads, time, sources) weights, with a narrow window those of as many sources as
    some queries at a time may see (2·window - 1, causal and from FEWEST on; 4·window - 3 both ways); on a GPU, without
    attn_mask, a kernel that makes them twice instead (kernels/flash_attention.py), and leaves out blocks of which
    nothing is seen. With floats as attn_mask, a dropout_p or sinks it is a chain of ordinary ops, on any device: all
    scores are made, whatever the window, and each op keeps its own; of 16 bits in float32, but for float16 on a GPU.
    """
    query, key, value = floats(query), floats(key), floats(value)
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) == 4 or not q[0] == k[0] == v[0] or k[:3] != v[:3] or q[3] != k[3] \
            or not k[1] or q[1] % k[1]:
        raise ValueError(f"attention: query {q}, key {k}, value {v} must be (batch, heads, time, size), (batch, "
                         "kv_heads, sources, size) and (batch, kv_heads, sources, out), kv_heads a divisor of heads")
    if isinstance(dropout_p, bool):
        raise TypeError(f"attention: dropout_p={dropout_p}; it is a probability, and stands before is_causal, as in "
                        "torch")
    dropped = dropout_p if callable(dropout_p) else functools.partial(dropout, p=dropout_p) if dropout_p else None
    mask, bias = _mask_and_bias(attn_mask, query, (*q[:3], k[2]))
    if sinks is not None:
        if tuple(sinks.shape) != q[1:2]:
            raise ValueError(f"attention: sinks {tuple(sinks.shape)} of {q[1]} heads: one score for each")
        sinks = astype(sinks, query.dtype)
    if documents is not None:
        documents = numbered(documents, (q[0], q[2]))
        if q[2] != k[2]:
            raise ValueError(f"attention: documents of {q[2]} positions, and {k[2]} sources: they are for "
                             "self-attention; elsewhere an attn_mask says who sees what")
        check_devices("attention", (lower(query), documents))
        documents = documents, documents
    band = band_of(is_causal, window)
    if window is not None:      # one that is as long as the sequence, is none
        band = part_of_band(band, slice(0, q[2]), slice(0, k[2])) or ALL
    return banded_attention(query, key, value, band, scale, mask, documents, bias, dropped, sinks)


def _mask_and_bias(attn_mask, query, shape):
    """(where a position may look, bool; what is added to its scores), each None where there is none."""
    if attn_mask is None:
        return None, None
    attn_mask = xp.asarray(attn_mask) if isinstance(attn_mask, (list, tuple)) else attn_mask
    raw = lower(attn_mask)
    if raw.dtype != bool and not is_floating(raw.dtype):
        raise TypeError(f"attention: attn_mask of dtype {raw.dtype}; it must be bool, True where a position may look, "
                        "or floats, which are added to the scores")
    check_devices("attention", (lower(query), raw))
    try:
        fits = xp.broadcast_shapes(attn_mask.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"attention: attn_mask {tuple(attn_mask.shape)} doesn't broadcast to {shape}")
    if raw.dtype == bool:
        return raw, None
    bias = astype(attn_mask, query.dtype)
    seen = lower(greater(bias, -xp.inf))    # apart: in a row of nothing else, -inf less the largest is NaN
    return seen, where(seen, bias, 0.0)


def banded_attention(query, key, value, band, scale=None, mask=None, documents=None, bias=None, dropped=None,
                     sinks=None):
    """The same for any band, unchecked; documents: the queries' numbers and the sources', int64; bias: floats, added to
    the scores; dropped: what drops weights; sinks: (heads,)."""
    if scale.__class__ in TRACED:       # as part of the queries it gets its gradient
        query, scale = query * astype(scale, query.dtype), 1.0
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else number(scale)
    if bias is not None or dropped is not None or sinks is not None:
        # In float32 and rounded once, as the op itself; on a GPU float16 has products of its own.
        short = is_short(query.dtype) and (device_of(lower(query)) == "cpu" or is_bfloat16(query.dtype))
        if short and state.autocast is None:
            kind = result_type(query.dtype, key.dtype, value.dtype)
            query, key, value = map(wide, (query, key, value))
            bias, sinks = (x if x is None else wide(x) for x in (bias, sinks))
            return astype(_definition(query, key, value, mask, documents, band, scale, bias, dropped, sinks), kind)
        return _definition(query, key, value, mask, documents, band, scale, bias, dropped, sinks)
    return bind(_attention, (query, key, value), (mask, documents, band, scale))


def numbered(documents, shape):
    """The numbers of documents as a bare array of int64. TypeError unless they are integers, ValueError unless of this
    shape."""
    documents = numbers_in(documents)
    if documents.dtype.kind not in "iu":
        raise TypeError(f"documents of dtype {documents.dtype}; they must be integers, equal within a document")
    if tuple(documents.shape) != tuple(shape):
        raise ValueError(f"documents {tuple(documents.shape)} must be (batch, time), here {tuple(shape)}: a number for "
                         "each position")
    return documents.astype(xp.int64, copy=False)
