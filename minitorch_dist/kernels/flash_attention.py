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

A band, (left, right): position t looks at sources t - left … t + right, and blocks outside are never loaded. All that
is loaded is looked at one by one, so that one loop does.

Documents: positions have numbers, and look at their own number alone. A program whose rows have the numbers a … b walks
from the first to the last position on the other side that has one of these: where documents lie side by side, next to
nothing is loaded in vain; where they don't, it is more, and as right.

Float32 on tensor cores, where they multiply tf32, 10 bits behind the leading one: x is tf32(x) + tf32(x - tf32(x)) but
for 2⁻²² of it, so that a product is three of tf32, and what is left out is as small. Sums are float32's: results are as
far from exact as by float32's own instructions (2.3e-7 and 1.8e-7 of their norm at 64 positions, 3.2e-7 and 2.9e-7 at
512; by one product of tf32 3e-4), by less than a third as many instructions of other kinds.

Sources: Dao et al. 2022, "FlashAttention"; Dao 2023, "FlashAttention-2"; Milakov & Gimelshein 2018 (the running sum);
Ootomo & Yokota 2022, "Recovering single precision accuracy from tensor cores while surpassing the FP32 theoretical peak
performance" (three products).
"""

import numpy as np

from . import Kept, Op, launch
from .attention_programs import forward_program, queries_program, sources_program
from .autotune import best
from .kernel import BELOW_80, Kernel

WIDEST = 128        # elements of a head
CAUSAL = None, 0
PLAIN = (None, None), CAUSAL        # bands without numbers of their own: code is compiled for each
# (kernel, how it multiplies, heads up to this size) -> block of queries, block of sources, warps and, where that isn't
# the record's, stages, where nothing has been measured: large ones whose code for sm_90 keeps all in registers (`--show
# sass` has no STL), causal or not, but for some bytes in "ieee". See block_options.
BLOCKS = {
    ("flash_attention", "16 bits", 64): (64, 64, 4), ("flash_attention", "16 bits", 128): (64, 64, 4),
    ("flash_attention", "ieee", 64): (32, 32, 4), ("flash_attention", "ieee", 128): (32, 16, 8),
    ("flash_attention", "tf32x3", 64): (64, 32, 4),
    ("flash_attention_queries", "16 bits", 64): (64, 64, 4), ("flash_attention_queries", "16 bits", 128): (64, 64, 8),
    ("flash_attention_queries", "ieee", 64): (32, 32, 4), ("flash_attention_queries", "ieee", 128): (32, 16, 8),
    ("flash_attention_queries", "tf32x3", 64): (64, 32, 4),
    ("flash_attention_sources", "16 bits", 64): (32, 64, 4), ("flash_attention_sources", "16 bits", 128): (32, 64, 8),
    ("flash_attention_sources", "ieee", 64): (16, 32, 4), ("flash_attention_sources", "ieee", 128): (16, 32, 4),
    ("flash_attention_sources", "tf32x3", 64): (32, 32, 4, 1),
}
# Where all is looked at one by one: with documents, whose numbers are in registers, too, or a band.
ONE_BY_ONE = BLOCKS | {
    ("flash_attention", "ieee", 64): (32, 16, 4), ("flash_attention", "ieee", 128): (32, 16, 4),
    ("flash_attention_queries", "16 bits", 64): (64, 32, 4), ("flash_attention_queries", "ieee", 128): (32, 16, 4),
    ("flash_attention_sources", "tf32x3", 64): (16, 32, 4, 1),
}


def weights(q, k, band, scale, documents=None):
    """softmax(q kᵀ · scale) in NumPy: (batch, heads, times, sources)."""
    scores = q @ np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3) * scale
    ahead = np.arange(scores.shape[3]) - np.arange(scores.shape[2])[:, None]
    left, right = (np.inf if end is None else end for end in band)
    sees = (ahead >= -left) & (ahead <= right)
    if documents is not None:
        own, theirs = documents
        sees = sees & (own[:, None, :, None] == theirs[:, None, None, :])
    scores = np.where(sees, scores, -np.inf)
    e = np.exp(scores - scores.max(-1, keepdims=True, initial=np.finfo(scores.dtype).min))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total > 0, total, 1)


def definition(q, k, v, band, scale, documents=None):
    """The same in NumPy."""
    return weights(q, k, band, scale, documents) @ np.repeat(v, q.shape[1] // k.shape[1], axis=1)


def gradient(ct, q, k, v, band, scale, documents=None):
    """The cotangents of q, k and v in NumPy."""
    share, p = q.shape[1] // k.shape[1], weights(q, k, band, scale, documents)
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
    numbers = {"heads": "i32", "share": "i32", "times": "i32", "sources": "i32", "left": "i32", "right": "i32",
               "scale": "fp32"}
    steps = _strides(*strides)
    blocks = ((16, 32, 4), (32, 32, 4), (32, 64, 4), (32, 64, 8), (64, 32, 4), (64, 64, 4), (64, 64, 8), (128, 32, 4),
              (128, 64, 4), (128, 64, 8), (64, 128, 8))
    return Kernel(
        name, fn, {**arrays, **numbers, **steps},
        {"CAUSAL": True, "BAND": False, "SIZE": 64, "OUT": 64, "WIDTH": 64, "OUT_WIDTH": 64, "PRECISION": "ieee",
         "QUERIES": 64, "SOURCES": 64},
        divisible=tuple(steps), strided=tuple(a for a, kind in arrays.items() if kind == "*"), num_stages=2,
        configs=tuple({"QUERIES": q, "SOURCES": s, "num_warps": warps, "num_stages": stages}
                      for q, s, warps in blocks for stages in (2, 3)), **more)


def block_options(kernel, itemsize, size, capability, one_by_one=False, precision="ieee"):
    """The options where nothing has been measured.

    Below 8.0 Triton multiplies without tensor cores: there the blocks are those of "ieee", which has none either. The
    forward kernel of float16 in blocks of (64, 64) would keep 3.7 KB of each thread in memory, in (32, 32) none.
    """
    table = ONE_BY_ONE if one_by_one else BLOCKS
    kind = "ieee" if capability < 80 else "16 bits" if itemsize == 2 else precision
    size = 64 if size <= 64 else 128
    blocks = table.get((kernel, kind, size)) or table[kernel, "ieee", size]
    return dict(zip(("QUERIES", "SOURCES", "num_warps", "num_stages"), blocks, strict=False))


def float32_precision(size, capability):
    """What float32 is multiplied in where nobody says: "tf32x3" or "ieee", of one accuracy (see above).

    Tensor cores for heads up to 64 on 9.x: there all that three products need stays in registers. On 8.0 and 10.0 each
    block that is as large has some 100 to 400 bytes of a thread in memory, and heads of 128 have on 9.0.
    """
    return "tf32x3" if size <= 64 and capability // 10 == 9 else "ieee"


def _example(kernel, dtype, size, documents=False, precision="ieee", **more):
    """An example as a call of heads of `size` makes it."""
    one_by_one = documents or more.get("BAND", False)
    more |= {} if documents else WITHOUT
    width, itemsize = launch.next_power_of_2(size), 4 if dtype == "fp32" else 2
    return {"*": dtype, "SIZE": size, "OUT": size, "WIDTH": width, "OUT_WIDTH": width, "PRECISION": precision,
            **block_options(kernel, itemsize, size, 90, one_by_one, precision),
            BELOW_80: {"PRECISION": "ieee", "num_stages": 2, **block_options(kernel, itemsize, size, 75, one_by_one)},
            **more}


def _with_documents(kernel):
    return (_example(kernel, "fp16", 64, True), _example(kernel, "fp32", 24, True),
            _example(kernel, "fp32", 64, True, "tf32x3"))


def _of_a_band(kernel):
    band = {"CAUSAL": False, "BAND": True}
    return (_example(kernel, "bf16", 64, **band), _example(kernel, "fp16", 128, **band),
            _example(kernel, "fp32", 64, precision="tf32x3", **band), _example(kernel, "fp16", 64, True, **band))


def _in_float32(kernel):
    return _example(kernel, "fp32", 24), _example(kernel, "fp32", 64, precision="tf32x3")


NUMBERS = {"documents": "*i64", "theirs": "*i64"}        # of the queries' documents, of the sources'
WITHOUT = dict.fromkeys(NUMBERS)
FORWARD = _record(
    "flash_attention", forward_program, {"q": "*", "k": "*", "v": "*", **NUMBERS, "out": "*", "logs": "*fp32"}, "qkvo",
    examples=(_example("flash_attention", "fp16", 64), *_in_float32("flash_attention"),
              _example("flash_attention", "bf16", 128, CAUSAL=False),
              *_with_documents("flash_attention"), *_of_a_band("flash_attention")))
QUERIES = _record(
    "flash_attention_queries", queries_program,
    {"ct": "*", "q": "*", "k": "*", "v": "*", **NUMBERS, "out": "*", "logs": "*fp32", "deltas": "*fp32",
     "gq": "*"},
    ("c", "q", "k", "v", "o", "gq"),
    examples=(_example("flash_attention_queries", "fp16", 64), *_in_float32("flash_attention_queries"),
              *_with_documents("flash_attention_queries"), *_of_a_band("flash_attention_queries")))
SOURCES = _record(
    "flash_attention_sources", sources_program,
    {"ct": "*", "q": "*", "k": "*", "v": "*", **NUMBERS, "logs": "*fp32", "deltas": "*fp32", "gk": "*",
     "gv": "*"},
    ("c", "q", "k", "v", "gk", "gv"),
    examples=(_example("flash_attention_sources", "fp16", 64), *_in_float32("flash_attention_sources"),
              *_with_documents("flash_attention_sources"), *_of_a_band("flash_attention_sources")))
KERNELS = (FORWARD, QUERIES, SOURCES)


def _constants(q, v, band, precision):
    size, out = q.shape[3], v.shape[3]
    if precision is None:
        precision = "ieee" if q.itemsize == 2 else float32_precision(max(size, out), launch.capability(q))
    width, out_width = (max(16, launch.next_power_of_2(n)) for n in (size, out))
    return {"CAUSAL": band == CAUSAL, "BAND": band not in PLAIN, "SIZE": size, "OUT": out, "WIDTH": width,
            "OUT_WIDTH": out_width, "PRECISION": precision}


def _blocks(kernel, q, v, documents, band, precision):
    return block_options(kernel.name, q.itemsize, max(q.shape[3], v.shape[3]), launch.capability(q),
                         documents is not None or band not in PLAIN, precision)


def _sizes(q, k, documents, band, precision):
    """What measured options are for. With documents or a band it is other code, which has less to do; and by three
    products."""
    batch, heads, times, size = q.shape
    other = [1] * (documents is not None) + [2] * (precision == "tf32x3") + [3] * (band not in PLAIN)
    return batch * heads, times, k.shape[2], size, *other


def _ends(band, q, k):
    """(left, right) as the kernels take them, in 32 bits: what is further than all positions is as far as need be."""
    (left, right), times, sources = band, q.shape[2], k.shape[2]
    return (times if left is None else max(-sources, min(left, times)),
            sources if right is None else max(-times, min(right, sources)))


def _side_by_side(x):
    """The array, or a copy whose last axis lies side by side in memory."""
    return x if x.shape[3] == 1 or x.strides[3] == x.itemsize else launch.contiguous(x)


def _counted(x, size):
    """Whether places in each head's rows can be counted in 32 bits, as the kernels do: of x, whose rows may be a row of
    features apart, and of what _empty makes of it with `size` elements per row."""
    apart = size * (x.shape[1] if x.strides[1] < x.strides[2] else 1)
    return x.shape[2] * max(abs(x.strides[2]) // x.itemsize, apart) < 2 ** 31


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


def flash_attention(q, k, v, band, scale, documents=None, precision=None):
    """(o, Kept((o, L))): q (batch, heads, time, size), k (batch, kv_heads, sources, size), v (batch, kv_heads, sources,
    out) of one dtype, sizes from 1 to 128; kv_heads divides heads.

    L is float32 (batch · heads, time), in powers of 2; -inf of a row that sees nothing, whose o is 0. documents: None,
    or two arrays of int64, (batch, time) and (batch, sources). precision: what float32 is multiplied in, "ieee",
    "tf32x3", "tf32"; None: see float32_precision. ValueError where the scale isn't more than 0.
    """
    if not scale > 0:
        raise ValueError(f"flash_attention: scale {scale} must be more than 0 (multiply q by a negative one's sign)")
    q, k, v = map(_side_by_side, (q, k, v))
    batch, heads, times, _ = q.shape
    constants = _constants(q, v, band, precision)
    out = _empty(q, v.shape[3], q)
    logs = launch.empty((batch * heads, times), np.float32, q)
    own, theirs = _documents(documents)
    numbers = heads, heads // k.shape[1], times, k.shape[2], *_ends(band, q, k), scale, *_steps(q, k, v, out)

    def run(options):
        grid = (batch * heads * launch.cdiv(times, options["QUERIES"]),)
        FORWARD(grid, q, k, v, own, theirs, out, logs, *numbers, **constants, **options)
    kind = documents, band, constants["PRECISION"]
    run(best(FORWARD, _sizes(q, k, *kind), q, run) or _blocks(FORWARD, q, v, *kind))
    return out, Kept((out, logs))


def flash_attention_gradient(ct, q, k, v, band, scale, kept, documents=None, precision=None):
    """The cotangents of q, k and v; `kept` is what forward has kept."""
    ct, q, k, v = map(_side_by_side, (ct, q, k, v))
    ct = ct if _counted(ct, v.shape[3]) else launch.contiguous(ct)
    (out, logs), (batch, heads, times, size) = kept, q.shape
    constants = _constants(q, v, band, precision)
    gq, gk, gv = _empty(q, size, q), _empty(k, size, q), _empty(v, v.shape[3], q)
    deltas = launch.empty(logs.shape, np.float32, q)
    own, theirs = _documents(documents)
    numbers = heads, heads // k.shape[1], times, k.shape[2], *_ends(band, q, k), scale
    kind = documents, band, constants["PRECISION"]
    sizes = _sizes(q, k, *kind)

    def queries(options):
        grid = (batch * heads * launch.cdiv(times, options["QUERIES"]),)
        QUERIES(grid, ct, q, k, v, own, theirs, out, logs, deltas, gq, *numbers, *_steps(ct, q, k, v, out, gq),
                **constants, **options)

    def sources(options):
        grid = (batch * k.shape[1] * launch.cdiv(k.shape[2], options["SOURCES"]),)
        SOURCES(grid, ct, q, k, v, own, theirs, logs, deltas, gk, gv, *numbers, *_steps(ct, q, k, v, gk, gv),
                **constants, **options)
    # First, for it makes the deltas:
    queries(best(QUERIES, sizes, q, queries) or _blocks(QUERIES, q, v, *kind))
    sources(best(SOURCES, sizes, q, sources) or _blocks(SOURCES, q, v, *kind))
    return gq, gk, gv


def attention(q, k, v, mask, documents, band, scale):
    """The op's forward, without a mask."""
    return flash_attention(q, k, v, band, scale, documents)


def attention_pullback(ct, wanted, q, k, v, documents, band, scale, aux):
    """The op's pullback."""
    return flash_attention_gradient(ct, q, k, v, band, scale, aux, documents)


def _fits(q, k, v, mask, documents, band, scale):
    return (mask is None and scale > 0 and q.dtype == k.dtype == v.dtype
            and 1 <= q.shape[3] <= WIDEST and 1 <= v.shape[3] <= WIDEST and q.size > 0 and k.shape[2] > 0
            and _counted(q, max(q.shape[3], v.shape[3])) and _counted(k, k.shape[3]) and _counted(v, v.shape[3]))


OPS = {"attention": Op(attention, attention_pullback, _fits)}
