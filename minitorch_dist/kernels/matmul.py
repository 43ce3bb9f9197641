"""A tiled matrix product with an epilogue: out = activation(a·b + bias).

A program makes one tile of `out`, TILE_M × TILE_N, in registers: it walks along K, and for each piece of TILE_K loads a
tile of a and one of b and multiplies them on the tensor cores, in float32. An element of a is so read N / TILE_N times
instead of N times. Bias and activation are applied to the tile before it is written: 4 bytes per float32 element of
`out` where separate operations would read and write it again for each, 16 more.

            N                       Programs are numbered in groups of GROUP rows of tiles, down the columns first, so
          +---+---+---+             that those running at once share tiles of a and of b in the L2 cache:
        K | b |   |   |
          +---+---+---+                 0  2  4 |
       K                                1  3  5 |  GROUP = 2
     +---+  +---+---+---+               6  8 10
    M| a |  |out|   |   |               7  9 11
     +---+  +---+---+---+

PRECISION is about float32 alone: "ieee" multiplies in float32; "tf32" rounds factors to 10 bits (5e-4) for the tensor
cores, which by the data sheet of an H100 do 7 times as many products a second. 16-bit factors are always exact.

Sources: Lam et al. 1991 (tiling); Williams et al. 2009 (why: the roofline); Hendrycks & Gimpel 2016 (GELU).
"""

import triton
import triton.language as tl

from . import launch
from .autotune import best
from .bias_gelu import definition as gelu_definition
from .bias_gelu import gelu_share
from .kernel import BELOW_80, Kernel

ACTIVATIONS = ("none", "relu", "gelu")
# How factors are multiplied -> TILE_M, TILE_N, TILE_K, warps where nothing has been measured: (many tiles, few). Larger
# tiles read less: from the L2 cache 2 · K · (M·N/TILE_N + M·N/TILE_M) elements. But every multiprocessor should have
# one. All keep what they need in registers on sm_80 and sm_90; "ieee" has no tensor cores, and more to keep.
TILES = {"16 bits": ((128, 128, 64, 8), (64, 64, 32, 4)), "tf32": ((128, 128, 32, 8), (64, 64, 32, 4)),
         "ieee": ((64, 64, 16, 4), (64, 64, 16, 4))}
MANY = 132          # an H200's multiprocessors


@triton.jit
def _matmul(a, b, bias, out, M, N, K, a_stride, b_stride,
            A_COLUMNS: tl.constexpr, B_COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
            TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr):
    down, across = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    group = tl.program_id(0) // (GROUP * across)
    place = tl.program_id(0) % (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    m = (group * GROUP + place % height) * TILE_M + tl.arange(0, TILE_M)
    n = place // height * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)

    # Which axis lies side by side in memory is known when compiling: its loads are wide then.
    if A_COLUMNS:
        a_at = a + m[:, None] + k.to(tl.int64)[None, :] * a_stride
        a_step = TILE_K * a_stride.to(tl.int64)
    else:
        a_at = a + m.to(tl.int64)[:, None] * a_stride + k[None, :]
        a_step = TILE_K
    if B_COLUMNS:
        b_at = b + k[:, None] + n.to(tl.int64)[None, :] * b_stride
        b_step = TILE_K
    else:
        b_at = b + k.to(tl.int64)[:, None] * b_stride + n[None, :]
        b_step = TILE_K * b_stride.to(tl.int64)

    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in range(0, K, TILE_K):
        here = start + k < K
        a_tile = tl.load(a_at, mask=(m < M)[:, None] & here[None, :], other=0.0)
        b_tile = tl.load(b_at, mask=here[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(a_tile, b_tile, total, input_precision=PRECISION)
        a_at += a_step
        b_at += b_step

    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "relu":
        total = tl.where(total < 0.0, 0.0, total)
    if ACTIVATION == "gelu":
        total = total * gelu_share(total, False)
    places = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def definition(a, b, bias=None, activation="none"):
    """The same in NumPy."""
    out = a @ b if bias is None else a @ b + bias
    return {"none": lambda x: x, "relu": lambda x: x * (x > 0), "gelu": gelu_definition}[activation](out)


def tile_options(m, n, precision, itemsize, capability):
    """The options where nothing has been measured. Below 8.0 Triton multiplies without tensor cores."""
    kind = "ieee" if capability < 80 else "16 bits" if itemsize == 2 else precision
    many, few = TILES[kind]
    tile = many if launch.cdiv(m, many[0]) * launch.cdiv(n, many[1]) >= MANY else few
    return dict(zip(("TILE_M", "TILE_N", "TILE_K", "num_warps"), tile, strict=True))


def _example(dtype, m, n, precision="ieee", **more):
    """An example as a call that makes m · n elements makes it."""
    options = (tile_options(m, n, precision, 4 if dtype == "fp32" else 2, capability) for capability in (90, 75))
    return {"*": dtype, "PRECISION": precision, **next(options), BELOW_80: next(options), **more}


MATMUL = Kernel(
    "matmul", _matmul,
    {"a": "*", "b": "*", "bias": "*", "out": "*", "M": "i32", "N": "i32", "K": "i32", "a_stride": "i32",
     "b_stride": "i32"},
    {"A_COLUMNS": False, "B_COLUMNS": False, "ACTIVATION": "none", "PRECISION": "ieee", "TILE_M": 64, "TILE_N": 64,
     "TILE_K": 32, "GROUP": 8},
    divisible=("M", "N", "K", "a_stride", "b_stride"), strided=("a", "b"),
    examples=(_example("fp16", 512, 512, bias=None), _example("fp32", 512, 512, bias=None),
              _example("fp32", 512, 512, "tf32", ACTIVATION="relu", B_COLUMNS=True),
              _example("bf16", 512, 512, ACTIVATION="gelu", A_COLUMNS=True),
              _example("fp16", 4096, 4096), _example("fp32", 4096, 4096, "tf32", bias=None)),
    configs=tuple({"TILE_M": m, "TILE_N": n, "TILE_K": k, "num_warps": warps, "num_stages": stages}
                  for m, n, k, warps, stages in (
                      (32, 32, 32, 4, 3), (64, 32, 32, 4, 4), (64, 64, 32, 4, 4), (64, 64, 64, 4, 3),
                      (128, 64, 32, 4, 4), (128, 64, 64, 4, 3), (128, 128, 32, 8, 3),
                      (128, 128, 64, 8, 3), (128, 256, 64, 8, 3))))
KERNELS = (MATMUL,)


def _stored(x):
    """(array, whether its columns lie side by side, its stride in elements); copied where neither axis does."""
    rows, columns = x.shape
    step = tuple(s // x.itemsize for s in x.strides)
    if step[1] == 1 and step[0] >= columns or rows == 1 and step[1] == 1:
        return x, False, max(step[0], columns)
    if step[0] == 1 and step[1] >= rows or columns == 1 and step[0] == 1:
        return x, True, max(step[1], rows)
    return launch.contiguous(x), False, columns


def matmul(a, b, bias=None, activation="none", precision="ieee"):
    """activation(a·b + bias): a (m, k), b (k, n), bias (n,) or None, all of one dtype, float32, float16 or bfloat16.

    activation "none", "relu" or "gelu"; precision "ieee" or "tf32", for float32. a and b may be transposed, or slices
    of rows. The sum is in float32 and is rounded once, behind the activation.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or bias is not None and bias.shape != b.shape[1:]:
        raise ValueError(f"matmul: a {a.shape}, b {b.shape}, bias {None if bias is None else bias.shape} must be "
                         "(m, k), (k, n) and (n,)")
    if len({x.dtype.name for x in (a, b, bias) if x is not None}) > 1:
        raise TypeError(f"matmul: a of {a.dtype}, b of {b.dtype}, bias of {None if bias is None else bias.dtype}; they "
                        "must have one dtype")
    if activation not in ACTIVATIONS or precision not in ("ieee", "tf32"):
        raise ValueError(f"matmul: activation {activation!r} and precision {precision!r}; there are {ACTIVATIONS} "
                         "and 'ieee', 'tf32'")
    (m, k), n = a.shape, b.shape[1]
    a, a_columns, a_stride = _stored(a)
    b, b_columns, b_stride = _stored(b)
    out = launch.empty((m, n), a.dtype, a)

    def run(options):
        grid = (launch.cdiv(m, options["TILE_M"]) * launch.cdiv(n, options["TILE_N"]),)
        MATMUL(grid, a, b, bias, out, m, n, k, a_stride, b_stride, A_COLUMNS=a_columns, B_COLUMNS=b_columns,
               ACTIVATION=activation, PRECISION=precision, **options)
    run(best(MATMUL, (m, n, k), a, run) or tile_options(m, n, precision, a.itemsize, launch.capability(a)))
    return out
