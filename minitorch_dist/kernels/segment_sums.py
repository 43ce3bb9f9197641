"""Sums of rows that share an index: out[i] = Σ g[j] over all j with index[j] = i, the same bits on every run.

The gradient of an embedding, and of any index by integers. Atomic additions, which are what CuPy has for it
(cupyx.scatter_add), arrive in another order on every run. Here the rows are sorted by their index first, without moving
them: a segment of the order belongs to each row of the result, whose programs walk it, each for some of the columns.
Where there are more rows than indices, it is the segment's first position that has programs, and other rows are zeroed
before (of a take_along_axis every element of the array is a row).

    index     2  0  2  5  0  2                key = index · n + j: none is there twice, so that every sort keeps
    order     1  4 | 0  2  5 | 3              rows of one index in the order in which they came
    out       0      2         5              1, 3 and 4 have no rows: zeros

A segment of up to STRETCH rows is added up one after the other, as NumPy's add.at does. A longer one is cut into LANES
stretches of consecutive rows, each added up in order at the same time as the others; then a fixed tree adds the lanes.
How it is cut depends on its length and on the shapes alone. (The tree goes through shared memory, where it costs more
than all else: so short segments, of which an embedding's gradient mostly consists, do without.)

Moves 4 bytes per float32 element of g and of out, and per row of g some 200 for its key and the sort. Up to SMALL
comparisons, which is 8,192 indices, keys are not sorted but counted, in one launch instead of nine: a key's position is
the number of smaller keys. The order is the same. In a CUDA graph they always are: CuPy's sort waits for the GPU. Sums
are float32 for float16 and bfloat16, float64 for float64.

Source: Blelloch 1990, "Prefix sums and their applications" (sums by segments).
"""

import math

import numpy as np
import triton
import triton.language as tl

from ..backend import module_of, recording, refuse_in_graph
from . import launch
from .kernel import Kernel

STRETCH = 16        # rows that are always added one after the other
LANES = 8, 64       # stretches of a segment at the same time, at least and at most
TILE = 1024         # elements of a program's tile, LANES × COLUMNS
SMALL = 1 << 26     # comparisons of two indices: some 20 µs on an H200


@triton.jit
def _segment_order(index, key, bounds, n, rows, SPARSE: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr):
    positions = tl.cdiv(n, LANES)
    place = tl.program_id(0) * LANES + tl.arange(0, LANES)
    j, mine = tl.full((LANES,), -1, tl.int32), place - positions * LANES    # behind the positions come the rows: how
    if tl.program_id(0) < positions:                                        # many keys are before their segments?
        row = tl.load(index + place, mask=place < n, other=0) % rows
        j, mine = place, tl.where(row < 0, row + rows, row).to(tl.int32)
    before = tl.zeros((LANES, COLUMNS), tl.int32)
    through = tl.zeros((LANES, COLUMNS), tl.int32)
    for first in range(0, n, COLUMNS):
        i = first + tl.arange(0, COLUMNS)
        other = tl.load(index + i, mask=i < n, other=0) % rows
        other = tl.where(i < n, tl.where(other < 0, other + rows, other), rows).to(tl.int32)[None, :]
        before += ((other < mine[:, None]) | (other == mine[:, None]) & (i[None, :] < j[:, None])).to(tl.int32)
        if SPARSE:
            through += (other <= mine[:, None]).to(tl.int32)
    count = tl.sum(before, axis=1)
    if tl.program_id(0) < positions:
        tl.store(key + count, mine.to(tl.int64) * n + j, mask=place < n)
        if SPARSE:
            tl.store(bounds + count, tl.sum(through, axis=1).to(tl.int64), mask=place < n)
    else:
        tl.store(bounds + mine, count.to(tl.int64), mask=mine <= rows)


@triton.jit
def _segment_sums(g, key, bounds, out, n, size, SPARSE: tl.constexpr, STRETCH: tl.constexpr, LANES: tl.constexpr,
                  COLUMNS: tl.constexpr, AHEAD: tl.constexpr):
    across = tl.cdiv(size, COLUMNS)
    place = (tl.program_id(0) // across).to(tl.int64)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    if SPARSE:      # a place is a position; bounds are the ends of its segment's positions
        row = tl.load(key + place) // n
        here = tl.load(key + place - 1, mask=place > 0, other=-1) < row * n     # it is the first of the row
        begin, end = place, tl.where(here, tl.load(bounds + place), place)
    else:           # a place is a row; bounds are where the rows' segments begin
        row, here = place, True
        begin, end = tl.load(bounds + row), tl.load(bounds + row + 1)
    count = (end - begin).to(tl.int32)
    double: tl.constexpr = g.dtype.element_ty == tl.float64
    if count <= STRETCH:        # of the lanes only the first would have rows
        short = tl.zeros((COLUMNS,), tl.float64 if double else tl.float32)
        for k in tl.range(0, count, num_stages=AHEAD):
            j = tl.load(key + begin + k) - row * n
            short += tl.load(g + j * size + column, mask=column < size, other=0.0).to(short.dtype)
        tl.store(out + row * size + column, short.to(out.dtype.element_ty), mask=here & (column < size))
        return
    length = tl.minimum(tl.maximum(tl.cdiv(count, LANES), STRETCH), count)
    first = begin + tl.arange(0, LANES) * length
    total = tl.zeros((LANES, COLUMNS), tl.float64 if double else tl.float32)
    for k in tl.range(0, length, num_stages=AHEAD):
        j = tl.load(key + first + k, mask=first + k < end, other=0) - row * n
        inside = (first + k < end)[:, None] & (column < size)[None, :]
        total += tl.load(g + j[:, None] * size + column[None, :], mask=inside, other=0.0).to(total.dtype)
    tl.store(out + row * size + column, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=here & (column < size))


def definition(g, index, rows):
    """The same in NumPy: g (n, …), index (n,) -> (rows, …)."""
    out = np.zeros((rows, *g.shape[1:]), g.dtype)
    np.add.at(out, index, g)
    return out


SEGMENT_SUMS = Kernel(
    "segment_sums", _segment_sums, {"g": "*", "key": "*i64", "bounds": "*i64", "out": "*", "n": "i64", "size": "i32"},
    {"SPARSE": False, "STRETCH": STRETCH, "LANES": 64, "COLUMNS": 16, "AHEAD": 4}, divisible=("size",),
    examples=({"*": "fp32"}, {"*": "fp32", "LANES": 8, "COLUMNS": 128}, {"*": "bf16", "LANES": 16, "COLUMNS": 64},
              {"*": "fp32", "SPARSE": True, "LANES": 8, "COLUMNS": 1}, {"*": "fp16"}, {"*": "fp64"}))
SEGMENT_ORDER = Kernel(
    "segment_order", _segment_order, {"index": "*i64", "key": "*i64", "bounds": "*i64", "n": "i32", "rows": "i32"},
    {"SPARSE": False, "LANES": 16, "COLUMNS": 256}, divisible=("n",), examples=({}, {"SPARSE": True}))
KERNELS = (SEGMENT_ORDER, SEGMENT_SUMS)


def _tile(n, rows, size):
    """Many lanes where segments are long on average, wide rows where they are short."""
    lanes = min(max(launch.next_power_of_2(max(n // rows, 1)), LANES[0]), LANES[1])
    return {"LANES": lanes, "COLUMNS": min(TILE // lanes, launch.next_power_of_2(size))}


def _order(index, rows, sparse):
    """(keys, bounds) of int64 indices (n,), as _segment_sums takes them."""
    n, xp = index.size, module_of(index)
    counted = recording.graph is not None or n * (n if sparse else n + rows) <= SMALL
    if rows >= 2 ** 31 or not counted:
        refuse_in_graph(f"sums of {n} rows by an index of {rows} (2³¹ or more), for whose sort CuPy waits,")
        key = xp.sort(index % rows * n + xp.arange(n))
        return key, xp.searchsorted(key, (key // n + 1) * n if sparse else xp.arange(rows + 1) * n)
    key, bounds = (launch.empty((count,), np.int64, index) for count in (n, n if sparse else rows + 1))
    lanes = SEGMENT_ORDER.constexprs["LANES"]
    programs = launch.cdiv(n, lanes) + (0 if sparse else launch.cdiv(rows + 1, lanes))
    SEGMENT_ORDER((programs,), launch.contiguous(index), key, bounds, n, rows, SPARSE=sparse)
    return key, bounds


def segment_sums(g, index, rows):
    """out (rows, …) with out[i] = Σ g[j] over index[j] = i, of g's dtype; rows that no index names are 0.

    g (*index.shape, …) floating. index: integers, those below 0 counted from the end; what is out of range is taken
    modulo `rows`, as CuPy does.
    """
    if index.dtype.kind not in "iu" or g.shape[:index.ndim] != index.shape:
        raise ValueError(f"segment_sums: index of {index.dtype} and shape {index.shape}, g {g.shape}: the index must "
                         "be of integers, and g's shape begin with its")
    shape, n, xp = (rows, *g.shape[index.ndim:]), index.size, module_of(g)
    size = math.prod(shape[1:])
    if not (n and rows and size):
        return xp.zeros(shape, g.dtype)
    sparse = rows > n
    key, bounds = _order(index.astype(np.int64, copy=False).ravel(), rows, sparse)
    out = xp.zeros(shape, g.dtype) if sparse else launch.empty(shape, g.dtype, g)
    tile = _tile(n, rows, size)
    SEGMENT_SUMS((min(n, rows) * launch.cdiv(size, tile["COLUMNS"]),), launch.contiguous(g), key, bounds, out, n, size,
                 SPARSE=sparse, **tile)
    return out
