"""Ring attention: each rank keeps its part of the queries, and everybody's keys and values come by.

    step       0              1              2              3
    rank 0     q₀ · k₀ v₀     q₀ · k₃ v₃     q₀ · k₂ v₂     q₀ · k₁ v₁        while rank r works with what it has,
    rank 1     q₁ · k₁ v₁     q₁ · k₀ v₀     q₁ · k₃ v₃     q₁ · k₂ v₂        that is on its way to rank r + 1
    rank 2     q₂ · k₂ v₂     q₂ · k₁ v₁     q₂ · k₀ v₀     q₂ · k₃ v₃
    rank 3     q₃ · k₃ v₃     q₃ · k₂ v₂     q₃ · k₁ v₁     q₃ · k₀ v₀

Softmax over a row in pieces: a piece gives o, softmax within it times v, and L, the logarithm of its sum of
exponentials. Two pieces together have L = log(exp L₁ + exp L₂) and o = o₁ exp(L₁ - L) + o₂ exp(L₂ - L). For backward
a rank keeps q, k, v, o and L of its own part, 1/N of everything: p = exp(score - L) is made again, piece by piece, in a
second round. The gradients of k and v travel behind them, each rank adds to them, and at the end they are home.

Causal, half of the products are empty, and are left out. Which half depends on who has what:

    position     0  1  2  3  4  5  6  7
    contiguous   0  0  1  1  2  2  3  3      rank r has r + 1 products of T/N: the last rank N times what the first has
    zigzag       0  1  2  3  3  2  1  0      of 2N chunks rank r has r and 2N - 1 - r: 2N + 1 products each of T/2N

Of several documents in a row, products of positions without a document in common are left out as well.

With a window w products of positions that are further apart are left out. Then all ranks of a contiguous layout have as
much to do, and causal keys need not go all the way round: R = 1 + ⌈(w - 1)/(T/N)⌉ ranks see them, however many there
are, and from the last of these their gradients go straight home. (Both ways, and zigzag, a rank's neighbours in the
sequence are on both sides of it in the ring, and R is N.)

What a rank sends: R - 1 times its keys and values forward, where R is N without a window; as much again and their
gradients backward.

Sources: Liu, Zaharia, Abbeel 2023, "Ring attention with blockwise transformers"; Milakov & Gimelshein 2018 (softmax in
pieces); Brandon et al. 2023, "Striped attention" (the balance); Dubey et al. 2024, "The Llama 3 herd of models" (2N
chunks).
"""

import functools
import math
import zlib

import numpy as np

from ... import backend, kernels, ledger
from ...autodiff.ops.attention import (
    ALL,
    allowed,
    band_of,
    greatest_in,
    grouped,
    masked_scores,
    numbered,
    part_of_band,
    pieces,
    scaled_dot_product_attention,
)
from ...autodiff.ops.elementwise import astype
from ...autodiff.primitive import Primitive, bind, lower
from ...backend import finfo, module_of, result_type, to, to_device_of, xp
from ..collectives import all_gather
from ..ring import as_was, come_by, pass_on

TIME = 2        # the axis of (batch, heads, time, size)
LAYOUTS = {     # (rank, ranks) -> its chunks of the sequence, in their order; all chunks are equally long
    "contiguous": lambda rank, ranks: (rank,),
    "zigzag": lambda rank, ranks: (rank, 2 * ranks - 1 - rank) if ranks > 1 else (0,),
}
LN2 = math.log(2)


# ---------------------------------------------------------------- who has which positions

def chunks(rank, ranks, layout):
    """The numbers of a rank's chunks; ValueError for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"context parallel: layout={layout!r} must be one of {', '.join(map(repr, LAYOUTS))}")
    return LAYOUTS[layout](rank, ranks)


def positions(time, rank, ranks, layout):
    """int64 (time,): where in the sequence the positions of a rank that has so many stand. ValueError unless its chunks
    are equally long."""
    own = chunks(rank, ranks, layout)
    if time % len(own):
        raise ValueError(f"context parallel: {time} positions on each of {ranks} ranks are no {len(own)} equal chunks; "
                         f"layout={layout!r} needs sequences of a multiple of {len(own) * ranks} positions")
    size = time // len(own)
    return np.concatenate([np.arange(size) + chunk * size for chunk in own])


def products(time, rank, source, ranks, band, layout):
    """[(queries, keys, band)]: what a rank multiplies of its `time` queries with as many keys of the rank `source`, two
    slices each, and the band between these (ops/attention.py)."""
    if band == ALL:
        return [(slice(0, time), slice(0, time), ALL)]
    own, theirs = chunks(rank, ranks, layout), chunks(source, ranks, layout)
    size = time // len(own)

    def part(chunk):
        return slice(chunk * size, (chunk + 1) * size)
    found = [(part(i), part(j), part_of_band(band, part(a), part(b)))
             for i, a in enumerate(own) for j, b in enumerate(theirs)]
    return [product for product in found if product[2] is not None]


@functools.cache
def steps(time, ranks, band, layout):
    """How many ranks' keys come by: as far as anybody has a product with them."""
    return 1 + max(((rank - source) % ranks for rank in range(ranks) for source in range(ranks)
                    if products(time, rank, source, ranks, band, layout)), default=0)


# ---------------------------------------------------------------- one product, on arrays

def _wide(*arrays):
    """Floats of 16 bits in float32: scores in 16 bits are too coarse for exp."""
    return [a.astype(xp.result_type(a.dtype, xp.float32), copy=False) for a in arrays]


def _add(total, more):
    """In place; what is too large for halves becomes inf without a warning, for optim.GradScaler to see."""
    with xp.errstate(over="ignore"):
        total += more


def _narrower(q, k, numbers, band):
    """ops/attention.py's pieces of a narrow band, each with the numbers of its documents."""
    return [(rows, columns, numbers and (numbers[0][:, rows], numbers[1][:, columns]), part)
            for rows, columns, part in pieces(q.shape[TIME], k.shape[TIME], band)]


def _add_parts(totals, rows, columns, parts):
    """A product's cotangents of q, k and v to the totals."""
    for total, at, part in zip(totals, (rows, columns, columns), parts, strict=True):
        _add(total[:, :, at], part)


def _attend(q, k, v, numbers, band, scale):
    """(o, L) of a piece: (batch, heads, queries, out), (batch, heads, queries). numbers: of both sides' documents."""
    if kernel := kernels.for_op("attention", (q, k, v, None, numbers, band, scale)):
        o, (_, logs) = kernel.forward(q, k, v, None, numbers, band, scale)
        return o, xp.maximum(logs.reshape(q.shape[:3]) * LN2, finfo(logs.dtype).min)
    q, k, v = _wide(q, k, v)
    if cut := _narrower(q, k, numbers, band):
        make = module_of(q)
        o, logs = make.zeros((*q.shape[:3], v.shape[3]), q.dtype), make.full(q.shape[:3], finfo(q.dtype).min, q.dtype)
        for rows, columns, *rules in cut:
            o[:, :, rows], logs[:, :, rows] = _attend(q[:, :, rows], k[:, :, columns], v[:, :, columns], *rules, scale)
        return o, logs
    p = masked_scores(q, k, allowed(q, k, None, numbers, band), scale)
    # A row that sees nothing, or whose scores all overflow: its piece is 0, not NaN, and weighs nothing beside others.
    greatest = xp.maximum(p.max(axis=-1, keepdims=True), finfo(p.dtype).min)
    p -= greatest
    xp.exp(p, out=p)
    total = xp.maximum(p.sum(axis=-1, keepdims=True), 1)
    o = backend.matmul(grouped(p, k.shape[1]), v).reshape(*q.shape[:3], v.shape[-1]) / total
    return o, (greatest + xp.log(total))[..., 0]


def _attend_pullback(ct, q, k, v, o, logs, numbers, band, scale):
    """What a piece adds to the cotangents of q, k and v; o and L are those of all pieces together."""
    if kernel := kernels.for_op("attention", (q, k, v, None, numbers, band, scale)):
        kept = kernels.Kept((o, module_of(q).ascontiguousarray(logs / LN2).reshape(-1, q.shape[TIME])))
        return kernel.pullback(ct, (True,) * 3, q, k, v, numbers, band, scale, kept)
    ct, q, k, v, o = _wide(ct, q, k, v, o)
    if cut := _narrower(q, k, numbers, band):
        totals = [module_of(x).zeros_like(x) for x in (q, k, v)]
        for rows, columns, *rules in cut:
            parts = _attend_pullback(ct[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], o[:, :, rows],
                                     logs[:, :, rows], *rules, scale)
            _add_parts(totals, rows, columns, parts)
        return totals
    groups, p = k.shape[1], masked_scores(q, k, allowed(q, k, None, numbers, band), scale)
    p -= logs[..., None]
    xp.exp(p, out=p)
    g = backend.matmul(grouped(ct, groups), v.swapaxes(2, 3)).reshape(p.shape)
    g -= (ct * o).sum(axis=-1, keepdims=True)
    g *= p
    g *= scale
    p, g = grouped(p, groups), grouped(g, groups)
    return (backend.matmul(g, k).reshape(q.shape), backend.matmul(g.swapaxes(2, 3), grouped(q, groups)),
            backend.matmul(p.swapaxes(2, 3), grouped(ct, groups)))


def _merge(o, logs, o_more, logs_more):
    """Put one more piece to (o, L), in place."""
    greatest = xp.maximum(logs, logs_more)
    weight, weight_more = xp.exp(logs - greatest), xp.exp(logs_more - greatest)
    total = weight + weight_more
    o *= (weight / total)[..., None]
    o += o_more * (weight_more / total)[..., None]
    logs[...] = greatest + xp.log(total)


# ---------------------------------------------------------------- the ring

def _one_array(k, v):
    """Keys and values side by side, to be sent at once."""
    return xp.concatenate([k.reshape(-1), v.reshape(-1)])


def _two_arrays(both, k, v):
    """Views of the two in it, of k's and v's shapes."""
    return both[:k.size].reshape(k.shape), both[k.size:].reshape(v.shape)


def _round(k, v, comm, steps):
    """Yield (rank, its keys, its values) of so many, one's own first; the next are on their way meanwhile."""
    for source, both in come_by(_one_array(k, v), comm, steps=steps):
        yield source, *_two_arrays(both, k, v)


def _agree(name, q, k, v, comm, band, scale, layout, documents):
    """MismatchError on all ranks unless all are here, with such parts and settings: a round is messages."""
    comm.agree(name, q.dtype, q.shape,
               f"key {k.shape}, value {v.shape}, {settings(band, scale, layout, documents)}")


def settings(band, scale, layout, documents):
    """What must be the same on all ranks, in words."""
    left, right = band
    window = "" if left is None else f", window={left + 1}"
    told = "" if documents is None else f", documents {zlib.crc32(to(documents, 'cpu').tobytes())}"
    return f"causal={right == 0}{window}, scale={scale}, {layout}{told}"


def _blocks(q, comm, source, band, layout, documents):
    """`products`, each with the numbers of both sides' documents, and noted in the ledger; none of no positions, nor of
    those that have no number in common."""
    time = q.shape[TIME]
    for rows, columns, part in products(time, comm.rank, source, comm.size, band, layout) if time else ():
        numbers = None
        if documents is not None:
            own, theirs = (documents[:, positions(time, rank, comm.size, layout)[places]]
                           for rank, places in ((comm.rank, rows), (source, columns)))
            if not ((own.min(1) <= theirs.max(1)) & (theirs.min(1) <= own.max(1))).any():
                continue
            numbers = to_device_of(own, q), to_device_of(theirs, q)
        ledger.launch("attention_block")
        with ledger.spanning("compute", "attention block", f"keys of rank {source}"):
            yield rows, columns, numbers, part


def _forward(q, k, v, comm, band, scale, layout, documents):
    _agree("ring_attention", q, k, v, comm, band, scale, layout, documents)
    make = module_of(q)
    kind = xp.result_type(q.dtype, xp.float32)      # sums of float16 are in float32
    o, logs = make.zeros((*q.shape[:3], v.shape[3]), kind), make.full(q.shape[:3], -xp.inf, kind)
    for source, k_there, v_there in _round(k, v, comm, steps(q.shape[TIME], comm.size, band, layout)):
        for rows, columns, *rules in _blocks(q, comm, source, band, layout, documents):
            piece = _attend(q[:, :, rows], k_there[:, :, columns], v_there[:, :, columns], *rules, scale)
            _merge(o[:, :, rows], logs[:, :, rows], *piece)
    return as_was(o, q.dtype), logs


def _pullback(ct, wanted, q, k, v, comm, band, scale, layout, documents, ans, aux):
    _agree("ring_attention, backward", q, k, v, comm, band, scale, layout, documents)
    others = steps(q.shape[TIME], comm.size, band, layout) - 1
    # Whatever is wanted here: the other ranks wait for all of it.
    gq, home, wait = module_of(q).zeros(q.shape, xp.result_type(q.dtype, xp.float32)), None, None
    for step, (source, k_there, v_there) in enumerate(_round(k, v, comm, others + 1)):
        both = module_of(k).zeros(k.size + v.size, k.dtype)
        gk, gv = _two_arrays(both, k, v)
        for rows, columns, *rules in _blocks(q, comm, source, band, layout, documents):
            parts = _attend_pullback(ct[:, :, rows], q[:, :, rows], k_there[:, :, columns], v_there[:, :, columns],
                                     ans[:, :, rows], aux[:, :, rows], *rules, scale)
            _add_parts((gq, gk, gv), rows, columns, parts)
        if home is None:
            home = both
            continue
        if wait is not None:
            _add(both, wait())      # what the ranks before have added
        wait = pass_on(both, comm, ahead=1 if step < others else -others)   # the last sends them home
    if wait is not None:
        _add(home, wait())
    found = as_was(gq, q.dtype), *_two_arrays(home, k, v)
    return tuple(g if w else None for g, w in zip(found, wanted, strict=True))


def _definition(q, k, v, comm, band, scale, layout, documents):
    here, everywhere = (np.concatenate([positions(q.shape[TIME], rank, comm.size, layout) for rank in ranks])
                        for ranks in ([comm.rank], range(comm.size)))
    left, right = (np.inf if end is None else end for end in band)
    ahead = everywhere - here[:, None]
    mask = None if band == ALL else to_device_of((-left <= ahead) & (ahead <= right), lower(q))
    if documents is not None:
        numbers = tuple(to_device_of(documents[:, part], lower(q)) for part in (here, everywhere))
        mask = allowed(q, k, mask, numbers, ALL)
    return scaled_dot_product_attention(q, all_gather(k, comm, TIME), all_gather(v, comm, TIME), mask, scale=scale)


_ring_attention = Primitive("ring_attention", _forward, "q k v", "comm band scale layout documents", aux=True,
                            definition=_definition, pullback=_pullback, own_sums=True)


def _greatest(q, k, comm, band, scale, layout, documents):
    nothing = k[..., :0]
    _agree("ring_attention's greatest scores", q, k, nothing, comm, band, scale, layout, documents)
    found = greatest_in(q[:, :, :0], k, None, None, ALL, scale)
    for source, k_there, _ in _round(k, nothing, comm, steps(q.shape[TIME], comm.size, band, layout)):
        for rows, columns, *rules in _blocks(q, comm, source, band, layout, documents):
            more = greatest_in(q[:, :, rows], k_there[:, :, columns], None, *rules, scale)
            xp.maximum(found, more, out=found)
    return found


_ring_greatest_scores = Primitive("ring_greatest_scores", _greatest, "q k", "comm band scale layout documents")


def check_parts(name, q, k, v):
    """ValueError unless these are queries, keys and values of the same positions."""
    if not len(q.shape) == len(k.shape) == len(v.shape) == 4 or k.shape[:3] != v.shape[:3] \
            or (q.shape[0], q.shape[2], q.shape[3]) != (k.shape[0], k.shape[2], k.shape[3]) \
            or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{name}: query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)} must be "
                         "(batch, heads, time, size), (batch, kv_heads, time, size) and (batch, kv_heads, time, out) "
                         "of this rank's positions, kv_heads a divisor of heads")


def ring_attention(query, key, value, comm, causal=False, layout="zigzag", scale=None, documents=None,
                   window=None, note=None):
    """scaled_dot_product_attention of sequences of which each rank of comm has an equal part. Collective.

    query   (batch, heads, time/N, size), of this rank's positions; the same shape on all ranks
    key     (batch, kv_heads, time/N, size); kv_heads divides heads, and only so many are sent
    value   (batch, kv_heads, time/N, out) -> (batch, heads, time/N, out)
    causal  a position looks at itself and those before it in the whole sequence
    layout  "zigzag" or "contiguous": which positions a rank has, see `positions`
    scale   default 1 / sqrt(size)
    documents  integers (batch, time) of the whole sequences, the same on all ranks: a position looks at those of its
            own number. Products of positions that have none in common are left out
    window  a position looks at those less than so many away only, itself among them
    note    None, or who is told the greatest score of each head, (heads,), of this rank's queries: keys go round once
            more for that, without values

    There is no dropout of weights. Forward mode and second derivatives gather the keys and values, and make all of this
    rank's scores at once. Of halves, sums over pieces are in float32, those of travelling gradients in halves.
    MismatchError on all ranks unless they agree about shapes, dtypes and settings; in forward mode and second
    derivatives settings aren't compared.
    """
    check_parts("ring_attention", query, key, value)
    positions(query.shape[TIME], comm.rank, comm.size, layout)
    kind = result_type(query.dtype, key.dtype, value.dtype)
    query, key, value = (astype(x, kind) for x in (query, key, value))
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    if documents is not None:
        documents = numbered(documents, (query.shape[0], comm.size * query.shape[TIME]))
        documents = to(documents, "cpu")    # which products are left out is asked there: none waits for a GPU's answer
    rules = comm, band_of(causal, window), scale, layout, documents
    if note is not None:
        note(bind(_ring_greatest_scores, (query, key), rules))
    return bind(_ring_attention, (query, key, value), rules)
