"""Means of |g| or g² over the rows and the columns of matrices that may be cut over ranks: the same bits in any cut.

    rank 0   |g g g g g|        fully_shard's pieces are stretches of a matrix, which begin and end anywhere in a row;
             |g g g|· ·         tensor parallelism's parts have some of its rows, or of its columns
    rank 1    · · ·|g g|
             |g g g g g|        a row's sum is over one rank's numbers and another's, and so is a column's

What floats add up to depends on their order, and a cut changes that. Whole numbers add up to the same in any order. So
each g² becomes one, in units of 2^-bits of the least power of 4 above the row's largest, for the row's sum, and again
for the column's; each |g| in units of 2^-bits of a power of 2. With bits = 62 - log₂ n the sum of n of them fits into
64. A mean is off by less than a unit, which is at most 4n/2^bits of it, 1.5·10⁻¹¹ for n = 4,096.

Over ranks that is one all-reduce of the exponents of the largest, 4 bytes per row and column, and one of the sums, 8.
"""

import zlib
from math import prod
from typing import NamedTuple

from ..backend import TILE, module_of, on_host, to_device_of, xp, zeros_like
from ..flat import boxes_of
from .optimizer import DEVICE_TILE

LEAST = -500        # of exponents: smaller numbers have a square that is 0, or nearly so, in float64
SPOILT = 1025       # the exponent of inf and NaN, as a float64 has it; no number's


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

    @property
    def vectors(self):
        """Shapes of a number per row, and of one per column."""
        n, rows, columns = self.whole
        return (n, rows, 1), (n, 1, columns)

    def of_part(self, rows, columns):
        """What is this part's of (n, rows, 1) and (n, 1, columns)."""
        return rows[:, self.places[0]], columns[:, :, self.places[1]]

    def multiply(self, x, lines):
        """Multiply x, 1-d, the stretch, by a number per row, (n, rows, 1), or per column, (n, 1, columns), in place."""
        by_row, by_column = lines.shape[1] > 1, lines.shape[2] > 1
        lines = lines[:, self.places[0]] if by_row else lines[:, :, self.places[1]] if by_column else lines
        for tile, boxes in self.tiles():
            for box in boxes:
                part = x[tile][box.elements].reshape(box.shape)
                part *= lines[box.rows if by_row else box.columns if by_column else box.rows[:1]]

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


class Vectors:
    """A number per row and one per column of a Matrix, in one array: `all`; `rows` (n, rows, 1) and `columns`
    (n, 1, columns) are views of it."""

    def __init__(self, matrix, like, dtype, first=0):
        rows, columns = matrix.vectors
        self.all = zeros_like(like, prod(rows) + prod(columns), dtype)
        if first:
            self.all[...] = first
        self.rows, self.columns = self.all[:prod(rows)].reshape(rows), self.all[prod(rows):].reshape(columns)

    def place(self, matrix, rows, columns):
        """Write what is the part's."""
        self.rows[:, matrix.places[0]], self.columns[:, :, matrix.places[1]] = rows, columns


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


def means(matrices, gradient, power):
    """[(means of |g|^power over rows (n, rows, 1), over columns (n, 1, columns))], float64, by Matrix, on all ranks
    that have some of it. NaN where a gradient is inf or NaN. Collective where matrices are cut: all ranks give the same
    ones in the same order, else MismatchError on all of them.

    gradient  gradient(k, tile) -> elements [tile] of what this rank has of the k-th's, 1-d
    power     1 or 2
    """
    with xp.errstate(invalid="ignore", over="ignore"):
        exponents = [largest(m, lambda tile, k=k: gradient(k, tile)) for k, m in enumerate(matrices)]
        over_ranks(matrices, exponents, "max", "exponents")
        sums = [summed(m, lambda tile, k=k: gradient(k, tile), e, power)
                for k, (m, e) in enumerate(zip(matrices, exponents, strict=True))]
        over_ranks(matrices, sums, "sum", "sums")
        return [tuple(xp.where(e == SPOILT, xp.nan, back(s.astype(xp.float64), scale(e, n, power), power) / n)
                      for e, s, n in ((by.rows, total.rows, m.whole[2]), (by.columns, total.columns, m.whole[1])))
                for m, by, total in zip(matrices, exponents, sums, strict=True)]


def largest(matrix, gradient):
    """Vectors: e of the row's, and the column's, largest |g| < 2^e, of this rank's; int32."""
    like, n = gradient(slice(0, 0)), matrix.part
    rows, columns = zeros_like(like, (n[0], n[1], 1)), zeros_like(like, (n[0], 1, n[2]))
    for tile, boxes in matrix.tiles():
        g = xp.absolute(gradient(tile))
        for box in boxes:
            here = g[box.elements].reshape(box.shape)
            for found, place, axis in (rows, box.rows, -1), (columns, box.columns, -2):
                xp.maximum(found[place], here.max(axis=axis, keepdims=True), out=found[place])
    vectors = Vectors(matrix, like, xp.int32, LEAST)
    vectors.place(matrix, *map(exponent, (rows, columns)))
    return vectors


def summed(matrix, gradient, exponents, power):
    """Vectors: Σ |g|^power of this rank's, in the units that the exponents say; int64."""
    sums, (_, rows, columns) = Vectors(matrix, exponents.all, xp.int64), matrix.whole
    by_row, by_column = matrix.of_part(scale(exponents.rows, columns, power), scale(exponents.columns, rows, power))
    of_rows, of_columns = (zeros_like(sums.all, by.shape) for by in (by_row, by_column))
    for tile, boxes in matrix.tiles():
        g = gradient(tile)
        for box in boxes:
            here = g[box.elements].reshape(box.shape)
            for found, by, place, axis in ((of_rows, by_row, box.rows, -1), (of_columns, by_column, box.columns, -2)):
                y = here * by[place]
                xp.absolute(y, out=y) if power == 1 else xp.multiply(y, y, out=y)
                found[place] += y.astype(xp.int64).sum(axis=axis, keepdims=True)
    sums.place(matrix, of_rows, of_columns)
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


def back(sums, scale, power):
    """What they are sums of, in units of 1. Twice divided, for the square of a scale can be inf."""
    return sums / scale if power == 1 else sums / scale / scale


def over_ranks(matrices, vectors, op, what):
    """Vectors of this rank's become those of all ranks that have some of the matrix: an all-reduce per Communicator."""
    groups = {}         # ids of Communicators -> (these, the matrices that are cut over them)
    for k, m in enumerate(matrices):
        if m.comms:
            groups.setdefault(tuple(map(id, m.comms)), (m.comms, []))[1].append(k)
    for comms, members in groups.values():
        together = module_of(vectors[members[0]].all).concatenate([vectors[k].all for k in members])
        known = zlib.crc32(repr([matrices[k].name for k in members]).encode())
        for comm in comms:
            comm.all_reduce(together, op, what=f"{what} of {len(members)} matrices, {known:08x}")
        at = 0
        for k in members:
            whole = vectors[k].all
            whole[...] = together[at:(at := at + whole.size)]
