"""Scaled dot-product attention, fused. Source: Vaswani et al. 2017; grouped heads: Ainslie et al. 2023."""

import functools
import math
import operator

from ... import backend
from ...backend import check_devices, finfo, module_of, xp
from ..primitive import Primitive, bind, lower
from .elementwise import where
from .fused import softmax
from .linalg import matmul
from .shape import reshape, swap_last


def allowed(q, k, mask, documents, causal):
    """Which sources each position may look at, broadcasting to (batch, heads, time, sources); None: all.

    documents  None, or a pair: the numbers of the queries' documents (batch, time), of the sources' (batch, sources)
    """
    rules = [] if mask is None else [mask]
    if documents is not None:
        here, there = documents
        rules.append(here[:, None, :, None] == there[:, None, None, :])
    if causal:
        rules.append(module_of(lower(q)).tri(q.shape[2], k.shape[2], dtype=bool))
    return functools.reduce(operator.and_, rules) if rules else None


def _definition(q, k, v, mask, documents, causal, scale):
    mask = allowed(q, k, mask, documents, causal)
    batch, heads, times, size = q.shape
    groups = k.shape[1]
    share = (batch, groups, heads // groups)
    k, v = (reshape(x, (batch, groups, 1, *x.shape[2:])) for x in (k, v))
    scores = matmul(reshape(q, (*share, times, size)), swap_last(k)) * scale
    scores = reshape(scores, (batch, heads, *scores.shape[3:]))
    if mask is not None:
        scores = where(mask, scores, float(finfo(scores.dtype).min) / 2)
    p = softmax(scores)
    if mask is not None:
        p = where(mask, p, 0.0)         # a row that may see nothing gives 0
    return reshape(matmul(reshape(p, (*share, *p.shape[2:])), v), (batch, heads, times, v.shape[-1]))


def grouped(x, groups):
    """The heads that share keys and values as more rows of one matrix."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups * x.shape[2], x.shape[3])


def masked_scores(q, k, mask, scale):
    """q kᵀ · scale of arrays, -inf where the mask is False: (batch, heads, time, sources)."""
    p = backend.matmul(grouped(q, k.shape[1]), k.swapaxes(2, 3)).reshape(*q.shape[:3], k.shape[2])
    p *= scale
    if mask is not None:
        xp.copyto(p, -xp.inf, where=xp.logical_not(mask))
    return p


def _forward(q, k, v, mask, documents, causal, scale):
    p = masked_scores(q, k, allowed(q, k, mask, documents, causal), scale)
    # Where all is masked the maximum is -inf and the sum 0: with these bounds the row becomes 0, not NaN.
    if p.size:      # a row of no source at all has no maximum, and needs none
        p -= xp.maximum(p.max(axis=-1, keepdims=True), finfo(p.dtype).min)
    xp.exp(p, out=p)
    p /= xp.maximum(backend.add_up(p, -1, True), 1)
    return backend.matmul(grouped(p, k.shape[1]), v).reshape(*q.shape[:3], v.shape[-1]), p


def _pullback(ct, wanted, q, k, v, scale, aux):
    # A masked place has p = 0, so that its score gets no cotangent: the mask itself isn't needed.
    groups = k.shape[1]
    g, p = grouped(ct, groups), grouped(aux, groups)
    gq = gk = None
    if wanted[0] or wanted[1]:
        scores = backend.matmul(g, v.swapaxes(2, 3))
        scores -= backend.add_up(scores * p, -1, True)
        scores *= p
        scores *= scale
        gq = backend.matmul(scores, k).reshape(q.shape) if wanted[0] else None
        gk = backend.matmul(scores.swapaxes(2, 3), grouped(q, groups)) if wanted[1] else None
    return gq, gk, backend.matmul(p.swapaxes(2, 3), g) if wanted[2] else None


_attention = Primitive("attention", _forward, "q k v", "mask documents causal scale", aux=True,
                       definition=_definition, pullback=_pullback)


def scaled_dot_product_attention(query, key, value, attn_mask=None, is_causal=False, scale=None, documents=None):
    """softmax(query keyᵀ · scale) value, head by head.

    query      (batch, heads, time, size)
    key        (batch, kv_heads, sources, size); kv_heads divides heads: head h reads key h // (heads / kv_heads)
    value      (batch, kv_heads, sources, out) -> (batch, heads, time, out)
    attn_mask  bool, broadcasting to (batch, heads, time, sources): True where a position may look
    is_causal  position t may look at sources 0 … t; with attn_mask, both must allow it
    scale      default 1 / sqrt(size)
    documents  integers (batch, time), for self-attention: a position may look at those of its own number, which need
               not stand side by side. With attn_mask and is_causal, all must allow it. Source: Dubey et al. 2024, "The
               Llama 3 herd of models", 3.2

    A position that may look at nothing gives 0. torch asks for enable_gqa=True before it groups heads; here the shapes
    say it. Backward keeps the (batch, heads, time, sources) weights; on a GPU, without attn_mask, a kernel that makes
    them twice instead (kernels/flash_attention.py), and leaves out blocks of other documents.
    """
    q, k, v = query.shape, key.shape, value.shape
    if not len(q) == len(k) == len(v) == 4 or not q[0] == k[0] == v[0] or k[:3] != v[:3] or q[3] != k[3] \
            or not k[1] or q[1] % k[1]:
        raise ValueError(f"attention: query {q}, key {k}, value {v} must be (batch, heads, time, size), (batch, "
                         "kv_heads, sources, size) and (batch, kv_heads, sources, out), kv_heads a divisor of heads")
    mask = None if attn_mask is None else lower(attn_mask)
    if mask is not None:
        if mask.dtype != bool:
            raise TypeError(f"attention: attn_mask of dtype {mask.dtype}; it must be bool, True where a position may "
                            "look")
        check_devices("attention", (lower(query), mask))
        try:
            xp.broadcast_shapes(mask.shape, (q[0], q[1], q[2], k[2]))
        except ValueError:
            raise ValueError(f"attention: attn_mask {mask.shape} doesn't broadcast to {(*q[:3], k[2])}") from None
    if documents is not None:
        documents = numbered(documents, (q[0], q[2]))
        if q[2] != k[2]:
            raise ValueError(f"attention: documents of {q[2]} positions, and {k[2]} sources: they are for "
                             "self-attention; elsewhere an attn_mask says who sees what")
        check_devices("attention", (lower(query), documents))
        documents = documents, documents
    scale = 1 / math.sqrt(q[3]) if scale is None else scale
    return bind(_attention, (query, key, value), (mask, documents, is_causal, scale))


def numbered(documents, shape):
    """The numbers of documents as a bare array of int64. TypeError unless they are integers, ValueError unless of this
    shape."""
    documents = lower(documents)
    if documents.dtype.kind not in "iu":
        raise TypeError(f"documents of dtype {documents.dtype}; they must be integers, equal within a document")
    if tuple(documents.shape) != tuple(shape):
        raise ValueError(f"documents {tuple(documents.shape)} must be (batch, time), here {tuple(shape)}: a number for "
                         "each position")
    return documents.astype(xp.int64, copy=False)
