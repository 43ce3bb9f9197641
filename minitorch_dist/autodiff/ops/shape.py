"""Ops that move elements and change none: reshape, transpose, concatenate, split. What is composed of them is in
arrange.py."""

from ...backend import is_whole, module_of, of_one_dtype, recording, whole, wholes, xp, zeros_like
from ..dispatch import as_array, operand, with_params
from ..primitive import TRACED, LinearOp, Primitive, Variadic, bind, lower

# ---------------------------------------------------------------- linear maps

reshaped = LinearOp("reshape", lambda t, r: _shaped(t, r[1]), lambda c, r: _shaped(c, r[0]), fresh=False)
permuted = LinearOp("transpose", lambda t, perm: transpose(t, perm), lambda c, perm: transpose(c, inverse(perm)),
                    fresh=False)
placed = LinearOp("place", lambda t, r: concatenate(_among_zeros(t, r), r[2]),
                  lambda c, r: _piece(c, *r), fresh=False)
cut = LinearOp("cut", lambda t, r: cut_sizes(t, r[0], r[1]), lambda c, r: concatenate(c.filled(r[2], r[0], r[1]), r[1]))
picked = LinearOp("pick", None, lambda c, r: Bundle.one(c, *r), fresh=False)


def inverse(perm):
    """The permutation that undoes `perm`."""
    back = [0] * len(perm)
    for i, p in enumerate(perm):
        back[p] = i
    return tuple(back)


class Bundle:
    """The cotangent of a node with several outputs: one part per output, None where none has arrived."""

    shape = dtype = None        # it fits a node that has no single shape

    def __init__(self, parts):
        self.count, self.arrived = len(parts), {i: part for i, part in enumerate(parts) if part is not None}

    @classmethod
    def one(cls, ct, k, n):
        """A Bundle of n parts of which only part k is there."""
        bundle = cls.__new__(cls)
        bundle.count, bundle.arrived = n, {k: ct}
        return bundle

    @property
    def parts(self):
        """All of them, as a tuple."""
        return tuple(map(self.arrived.get, range(self.count)))

    def __add__(self, other):
        """In place: of thousands of outputs each adds one part."""
        for i, part in other.arrived.items():
            self.arrived[i] = self.arrived[i] + part if i in self.arrived else part
        return self

    def filled(self, shape, sizes, axis):
        """The parts with zeros in place of the missing ones; part i has sizes[i] along `axis` of `shape`."""
        example = lower(next(iter(self.arrived.values())))
        return [p if p is not None else zeros_like(example, shape[:axis] + (size,) + shape[axis + 1:])
                for p, size in zip(self.parts, sizes, strict=True)]


def _piece(c, i, sizes, axis):
    """Piece i of c, cut along an axis. Of an array no other is made: of n that were joined each asks for one."""
    if c.__class__ in TRACED:
        return cut_sizes(c, sizes, axis)[i]
    start = sum(sizes[:i])
    return c[(slice(None),) * axis + (slice(start, start + sizes[i]),)]


def _among_zeros(t, r):
    """The tangent of input i of a concatenation, standing in its place between zeros."""
    i, sizes, axis = r
    shape = t.shape
    return [t if k == i else zeros_like(lower(t), shape[:axis] + (size,) + shape[axis + 1:])
            for k, size in enumerate(sizes)]


# ---------------------------------------------------------------- primitives

_reshape = Primitive("reshape", lambda x, old, new: x.reshape(new), params="old new",
                     x=(reshaped, "old new"))
_transpose = Primitive("transpose", lambda x, perm: x.transpose(perm), params="perm", x=(permuted, "perm"))
_reshaping, _permuting = with_params(_reshape), with_params(_transpose)


def _split_forward(x, sizes, axis, shape):
    ends = [sum(sizes[:i + 1]) for i in range(len(sizes) - 1)]
    return tuple(module_of(x).split(x, ends, axis))


_split = Primitive("split", _split_forward, params="sizes axis shape", multi=True,
                   x=(cut, "sizes axis shape"))
PICK = Primitive("pick", None, params="k n", x=(picked, "k n"))


TOGETHER = 8    # arrays that CuPy joins without copying a table of their addresses up, which no CUDA graph can repeat


def _joined(xs, sizes, axis):
    if len(xs) > TOGETHER and recording.graph is not None:
        xs = [_joined(xs[i:i + TOGETHER], sizes, axis) for i in range(0, len(xs), TOGETHER)]
        return _joined(xs, sizes, axis)
    try:
        return xp.concatenate(xs, axis)
    except xp.exceptions.DTypePromotionError:
        return xp.concatenate(of_one_dtype(xs), axis)


_concatenate = Variadic("concatenate", _joined, "sizes axis",
                        lambda i, n: (placed, lambda sizes, axis: (i, sizes, axis)))

# ---------------------------------------------------------------- what users call


def reshape(x, *shape):
    """x with the same elements in row-major order in another shape; one extent may be -1."""
    shape = wholes("shape", shape[0] if len(shape) == 1 else shape)
    try:
        old = x.shape
    except AttributeError:
        return reshape(as_array("reshape", x), shape)
    if shape and min(shape) < 0:
        known = 1
        for extent in shape:
            known *= extent if extent != -1 else 1
        count = 1
        for extent in old:
            count *= extent
        if shape.count(-1) != 1 or known <= 0 or count % known:
            raise ValueError(f"reshape: can't reshape {old} into {shape}: {count} elements don't divide so")
        shape = tuple(count // known if extent == -1 else extent for extent in shape)
    return _reshaping(x, (old, shape))


def _shaped(x, shape):
    """The same, of a tuple of ints that has been looked at: as rules call it, often."""
    return _reshaping(x, (x.shape, shape))


def transpose(x, *perm):
    """x with its axes in the order `perm` (default: reversed)."""
    torchs = len(perm) == 2
    perm = wholes("perm", perm[0] if len(perm) == 1 else perm)
    try:
        n = len(x.shape)
    except AttributeError:
        return transpose(as_array("transpose", x), perm)
    perm = tuple(p + n if p < 0 else p for p in perm) if perm else tuple(range(n - 1, -1, -1))
    if sorted(perm) != list(range(n)):
        raise ValueError(f"transpose: {perm} is not an order of the {n} axes of shape {x.shape}"
                         + f"; swapaxes(x, {perm[0]}, {perm[1]}) exchanges two" * torchs)
    if torchs and perm == (0, 1):       # of torch, whose function exchanges two axes: it would change nothing here
        raise ValueError(f"transpose(x, 0, 1) of shape {x.shape}: this function takes the axes' order, and (0, 1) is "
                         "the one they have; swapaxes(x, 0, 1), x.T and x.transpose(0, 1) exchange them")
    return _permuting(x, (perm,))


def swap_last(x):
    """x with its last two axes exchanged."""
    if x.__class__ not in TRACED:
        return x.swapaxes(-1, -2)
    n = len(x.shape)
    return transpose(x, (*range(n - 2), n - 1, n - 2))


def concatenate(arrays, axis=0):
    """The arrays one after another along an axis that they already have."""
    arrays = as_arrays("concatenate", arrays)
    if not arrays:
        raise ValueError("concatenate: needs at least one array")
    axis = one_axis("concatenate", axis, arrays[0].shape)
    if len({len(a.shape) for a in arrays}) > 1:
        raise ValueError(f"concatenate: arrays of shapes {[tuple(a.shape) for a in arrays]}; all need as many axes")
    return bind(_concatenate.of(len(arrays)), arrays, (tuple(a.shape[axis] for a in arrays), axis))


def as_arrays(name, values):
    """Arrays and traced values as they are, numbers and lists as arrays: a list."""
    if not hasattr(values, "__iter__"):
        raise TypeError(f"{name}: takes a list or a tuple of arrays, got a {type(values).__name__}")
    return [v if hasattr(v, "shape") else xp.asarray(operand(name, v, v)) for v in values]


def one_axis(name, axis, shape):
    """An axis of `shape`, counted from the front."""
    axis = whole("axis", axis)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{name}: axis {axis} is out of range for shape {shape}")
    return axis % len(shape)


def cut_sizes(x, sizes, axis=0):
    """x cut along `axis` into a tuple of pieces of the given sizes."""
    axis, sizes = one_axis("split", axis, x.shape), wholes("sizes", sizes)
    if sum(sizes) != x.shape[axis] or any(size < 0 for size in sizes):
        raise ValueError(f"split: sizes {sizes} add up to {sum(sizes)}, axis {axis} of {x.shape} has "
                         f"{x.shape[axis]}; each must be at least 0")
    return bind(_split, (x,), (sizes, axis, x.shape))


def split(x, indices_or_sections, axis=0):
    """x cut along `axis`, as in NumPy: an int is the number of equal parts, a sequence the places to cut at.

    The method x.split is torch's: an int is the size of each part, a sequence the sizes. Returns a tuple.
    """
    extent = x.shape[one_axis("split", axis, x.shape)]
    cuts = wholes("indices_or_sections", indices_or_sections)
    if is_whole(indices_or_sections):
        parts, = cuts
        if parts < 1 or extent % parts:
            raise ValueError(f"split: {extent} elements don't divide into {parts} equal parts")
        return cut_sizes(x, (extent // parts,) * parts, axis)
    # Cuts mean what slices mean: from the end where negative, at the end where too large.
    ends = [0, *(slice(0, cut).indices(extent)[1] for cut in cuts), extent]
    if sorted(ends) != ends:
        raise ValueError(f"split: the cuts {cuts} are not in ascending order")
    return cut_sizes(x, tuple(b - a for a, b in zip(ends, ends[1:], strict=False)), axis)


def split_by_size(x, split_size_or_sections, dim=0):
    """torch's x.split: pieces of one size (the last may be smaller), or of the given sizes. Returns a tuple."""
    if not is_whole(split_size_or_sections):
        return cut_sizes(x, split_size_or_sections, dim)
    extent, size = x.shape[one_axis("split", dim, x.shape)], whole("size", split_size_or_sections)
    if size < 1:
        raise ValueError(f"split: pieces of {size} elements; a size must be at least 1")
    return cut_sizes(x, tuple(min(size, extent - i) for i in range(0, extent, size)) or (0,), dim)


def chunk(x, chunks, dim=0):
    """x cut along `dim` into at most `chunks` pieces of one size (the last may be smaller), as in torch; an empty
    one into `chunks`."""
    chunks = whole("chunks", chunks)
    if chunks < 1:
        raise ValueError(f"chunk: {chunks} chunks; there must be at least 1")
    extent = x.shape[one_axis("chunk", dim, x.shape)]
    return split_by_size(x, -(-extent // chunks) or (0,) * chunks, dim)
