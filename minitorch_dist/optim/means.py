"""Means of |g| or g² over the rows and the columns of matrices that may be cut over ranks: the same bits in any cut.

    rank 0   |g g g g g|        fully_shard's pieces are stretches of a matrix, which begin and end anywhere in a row;
             |g g g|· ·         tensor parallelism's parts have some of its rows, or of its columns
    rank 1    · · ·|g g|
             |g g g g g|        a row's sum is over one rank's numbers and another's, and so is a column's

What floats add up to depends on their order, and a cut changes that. Whole numbers add up to the same in any order. So
each g² becomes one, in units of 2^-bits of the least power of 4 above the row's largest, for the row's sum, and again
for the column's; each |g| in units of 2^-bits of a power of 2. With bits = 62 - log₂ n the sum of n of them fits into
64. A mean is off by less than a unit, which is at most 4n/2^bits of it, 1.5·10⁻¹¹ for n = 4,096.

Over ranks that is one all-reduce of the exponents of the largest, 4 bytes per row, or column, and one of the sums, 8.
"""

import zlib
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from ..backend import TILE, on_host, to_device_of, xp, zeros_like
from ..flat import boxes_of, joined
from .optimizer import DEVICE_TILE

LEAST = -500        # of exponents: smaller numbers have a square that is 0, or nearly so, in float64
SPOILT = 1025       # the exponent of inf and NaN, as a float64 has it; no number's
SIDES = {"rows": -1, "columns": -2}     # a number for each of these: over which axis


class Box(NamedTuple):
    """Some rows and columns of some matrices of a stack: which elements of a tile these are, of what shape; where the
    sums over its rows lie in (n, rows, 1), and those over its columns in (n, 1, columns)."""

    elements: slice
    shape: tuple
    rows: tuple
    columns: tuple


class Matrix:
    """What this rank has of a matrix, or of a stack of n: a stretch of elements, in C order, of a part of it.

    tensor  a leaf of two axes at least, the parameter or its piece; the last two are the matrix's

    whole   (n, rows, columns) of which row and column means are made
    part    the same of what tensor parallelism has left here
    start, size  the stretch
    comms   over whose ranks the rest of it lies

    Of a part collective, when it is made first: ValueError on all ranks whose parts aren't each row, or column, once.
    """

    def __init__(self, tensor):
        leaf, shape = tensor.leaf, part_shape(tensor)
        unit, cut = leaf.flat.unit, part_of_matrix(tensor)
        self.part, self.whole = ((prod(s[:-2]), *s[-2:]) for s in (shape, whole_shape(tensor)))
        self.start, self.size = 0 if unit is None else unit.piece(tensor)[0], tensor.data.size
        self.comms = tuple(each.comm for each in (unit, cut) if each is not None)
        self.name = leaf.piece_of, cut and cut.number, self.whole
        self.places = [slice(None), slice(None)]        # of the part's rows, and columns, in the whole
        if cut is not None:
            cut.of_ranks()      # raises where two ranks have the same rows, which would count twice
            self.places[cut.axis - len(shape)] = to_device_of(cut.indices, tensor.data)
        self.tile = tile_of(tensor.data)

    def vector(self, side):
        """The shape of a number per row, or per column."""
        return vector_shape(self.whole, side)

    def length(self, side):
        """Of a row, or a column."""
        return self.whole[SIDES[side]]

    def of_part(self, side, x):
        """What is this part's of (n, rows, 1), or of (n, 1, columns)."""
        return x[self.place(side)]

    def place(self, side):
        """Where this part's lie among all rows, or columns."""
        return (slice(None), self.places[0]) if side == "rows" else (slice(None), slice(None), self.places[1])

    def multiply(self, x, lines):
        """Multiply x, 1-d, the stretch, by a number per row, (n, rows, 1), or per column, (n, 1, columns), in place."""
        side = "rows" if lines.shape == self.vector("rows") else "columns"
        lines = self.of_part(side, lines)
        for tile, boxes in self.tiles():
            for box in boxes:
                part = x[tile][box.elements].reshape(box.shape)
                part *= lines[getattr(box, side)]

    def tiles(self):
        """[(slice of the stretch, [Box])], each tile_of elements."""
        for at in range(0, self.size, self.tile):
            end, boxes, here = min(at + self.tile, self.size), [], 0
            for box in boxes_of(self.part, self.start + at, self.start + end):
                shape = tuple(stop - start for start, stop in box)
                stack, rows, columns = (slice(*side) for side in box)
                boxes.append(Box(slice(here, here := here + prod(shape)), shape, (stack, rows),
                                 (stack, slice(None), columns)))
            yield slice(at, end), boxes


class Vectors(dict):
    """{side: numbers per row, (n, rows, 1), or per column, (n, 1, columns), of a Matrix}: views of one array, `all`."""

    def __init__(self, matrix, like, dtype, sides, first=0):
        shapes = [matrix.vector(side) for side in sides]
        ends = [0, *accumulate(map(prod, shapes))]
        self.all = zeros_like(like, ends[-1], dtype)
        if first:
            self.all[...] = first
        super().__init__((side, self.all[start:stop].reshape(shape)) for side, shape, (start, stop) in
                         zip(sides, shapes, pairwise(ends), strict=True))


def vector_shape(shape, side):
    """Of a number per row, (n, rows, 1), or per column, (n, 1, columns), of a stack (n, rows, columns)."""
    n, rows, columns = shape
    return (n, rows, 1) if side == "rows" else (n, 1, columns)


def tile_of(array):
    """Elements that are worked on at a time: as many as fit into the cache; on a GPU so many that it has work."""
    return TILE if on_host(array) else DEVICE_TILE


def part_shape(tensor):
    """The shape of a parameter, or of the part that tensor parallelism has left of it, of which fully_shard may have
    made a piece."""
    unit = tensor.leaf.flat.unit
    return tuple(tensor.shape if unit is None else unit.shape_of(tensor))


def part_of_matrix(tensor):
    """The Part of which a tensor is, where its matrices are cut; None: they are whole, and others of a stack may be on
    other ranks."""
    part = tensor.leaf.part
    return part if part is not None and part.axis >= len(part_shape(tensor)) - 2 else None


def whole_shape(tensor):
    """The shape of a parameter whose matrices are whole."""
    return tuple(tensor.leaf.part_of) if part_of_matrix(tensor) is not None else part_shape(tensor)


def means(matrices, gradient, power, sides=None):
    """[[means of |g|^power over rows (n, rows, 1), over columns (n, 1, columns)]], float64, by Matrix, on all ranks
    that have some of it. NaN where a gradient is inf or NaN. Collective where matrices are cut: all ranks give the same
    ones in the same order, else MismatchError on all of them.

    gradient  gradient(k, tile) -> elements [tile] of what this rank has of the k-th's, 1-d
    power     1 or 2
    sides     by matrix, which of SIDES are wanted; None: both
    """
    sides = [tuple(SIDES)] * len(matrices) if sides is None else sides
    with xp.errstate(invalid="ignore", over="ignore"):
        exponents = [largest(m, lambda tile, k=k: gradient(k, tile), sides[k]) for k, m in enumerate(matrices)]
        over_ranks(matrices, exponents, "max", "exponents")
        sums = [summed(m, lambda tile, k=k: gradient(k, tile), e, power)
                for k, (m, e) in enumerate(zip(matrices, exponents, strict=True))]
        over_ranks(matrices, sums, "sum", "sums")
        return [[mean(total[side], e, m.length(side), power) for side, e in by.items()]
                for m, by, total in zip(matrices, exponents, sums, strict=True)]


def largest(matrix, gradient, sides):
    """Vectors: e of the row's, or the column's, largest |g| < 2^e, of this rank's; int32."""
    like = gradient(slice(0, 0))
    found = {side: zeros_like(like, vector_shape(matrix.part, side)) for side in sides}
    for tile, boxes in matrix.tiles():
        g = xp.absolute(gradient(tile))
        for box in boxes:
            here = g[box.elements].reshape(box.shape)
            for side, most in found.items():
                place = getattr(box, side)
                xp.maximum(most[place], here.max(axis=SIDES[side], keepdims=True), out=most[place])
    vectors = Vectors(matrix, like, xp.int32, sides, LEAST)
    for side, most in found.items():
        vectors[side][matrix.place(side)] = exponent(most)
    return vectors


def summed(matrix, gradient, exponents, power):
    """Vectors: Σ |g|^power of this rank's, in the units that the exponents say; int64."""
    sums = Vectors(matrix, exponents.all, xp.int64, tuple(exponents))
    by = {side: matrix.of_part(side, scale(e, matrix.length(side), power)) for side, e in exponents.items()}
    found = {side: zeros_like(sums.all, scales.shape) for side, scales in by.items()}
    for tile, boxes in matrix.tiles():
        g = gradient(tile)
        for box in boxes:
            here = g[box.elements].reshape(box.shape)
            for side, total in found.items():
                place = getattr(box, side)
                y = here * by[side][place]
                xp.absolute(y, out=y) if power == 1 else xp.multiply(y, y, out=y)
                total[place] += y.astype(xp.int64).sum(axis=SIDES[side], keepdims=True)
    for side, total in found.items():
        sums[side][matrix.place(side)] = total
    return sums


def exponent(x):
    """e of x < 2^e, not below LEAST, SPOILT of inf and NaN; x at least 0."""
    bits = xp.absolute(x.astype(xp.float64)).view(xp.int64)
    return xp.maximum(bits // 2 ** 52 - 1022, LEAST).astype(xp.int32)


def scale(e, n, power):
    """2^(bits/power - e), by which a number is multiplied so that its power is in units of 2^-bits of 2^(power·e), for
    a sum of n of them; float64."""
    bits = (62 - max(n - 1, 0).bit_length()) // power
    return ((bits + 1023 - e.astype(xp.int64)) * 2 ** 52).view(xp.float64)


def mean(sums, e, n, power):
    """Of n numbers, in units of 1; float64. Twice divided, for the square of a scale can be inf."""
    by = scale(e, n, power)
    total = sums.astype(xp.float64) / by
    return xp.where(e == SPOILT, xp.nan, (total if power == 1 else total / by) / n)


def over_ranks(matrices, vectors, op, what):
    """Vectors of this rank's become those of all ranks that have some of the matrix: an all-reduce per Communicator."""
    groups = {}         # ids of Communicators -> (these, the matrices that are cut over them)
    for k, m in enumerate(matrices):
        if m.comms:
            groups.setdefault(tuple(map(id, m.comms)), (m.comms, []))[1].append(k)
    for comms, members in groups.values():
        together, parts = joined([vectors[k].all for k in members])
        known = zlib.crc32(repr([matrices[k].name for k in members]).encode())
        for comm in comms:
            comm.all_reduce(together, op, what=f"{what} of {len(members)} matrices, {known:08x}")
        for k, part in zip(members, parts, strict=True):
            vectors[k].all[...] = part
