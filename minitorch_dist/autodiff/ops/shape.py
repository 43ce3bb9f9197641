"""Ops that move elements and change none: reshape, transpose, concatenate, split."""

from ...backend import module_of, xp, zeros_like
from ..primitive import LinearOp, Primitive, bind, lower

# ---------------------------------------------------------------- linear maps

reshaped = LinearOp("reshape", lambda t, r: reshape(t, r[1]), lambda c, r: reshape(c, r[0]), fresh=False)
permuted = LinearOp("transpose", lambda t, perm: transpose(t, perm), lambda c, perm: transpose(c, inverse(perm)),
                    fresh=False)
placed = LinearOp("place", lambda t, r: concatenate(_among_zeros(t, r), r[2]),
                  lambda c, r: split(c, r[1], r[2])[r[0]], fresh=False)
cut = LinearOp("cut", lambda t, r: split(t, r[0], r[1]), lambda c, r: concatenate(c.filled(r[2], r[0], r[1]), r[1]))
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
        self.parts = parts

    @classmethod
    def one(cls, ct, k, n):
        """A Bundle of n parts of which only part k is there."""
        return cls(tuple(ct if i == k else None for i in range(n)))

    def __add__(self, other):
        return Bundle(tuple(b if a is None else a if b is None else a + b
                            for a, b in zip(self.parts, other.parts, strict=True)))

    def filled(self, shape, sizes, axis):
        """The parts with zeros in place of the missing ones; part i has sizes[i] along `axis` of `shape`."""
        example = lower(next(p for p in self.parts if p is not None))
        return [p if p is not None else zeros_like(example, shape[:axis] + (size,) + shape[axis + 1:])
                for p, size in zip(self.parts, sizes, strict=True)]


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


def _split_forward(x, sizes, axis, shape):
    ends = [sum(sizes[:i + 1]) for i in range(len(sizes) - 1)]
    return tuple(module_of(x).split(x, ends, axis))


_split = Primitive("split", _split_forward, params="sizes axis shape", multi=True,
                   x=(cut, "sizes axis shape"))
PICK = Primitive("pick", None, params="k n", x=(picked, "k n"))


class _Concatenate:
    """Concatenation takes any number of inputs: one table entry per number, made when first met."""

    def __init__(self):
        self.by_count = {}

    def __call__(self, n):
        if n not in self.by_count:
            inputs = [f"x{i}" for i in range(n)]
            rules = {name: self.rule(i) for i, name in enumerate(inputs)}
            self.by_count[n] = Primitive(f"concatenate_{n}", lambda *a: xp.concatenate(a[:-2], a[-1]),
                                         " ".join(inputs), "sizes axis", **rules)
        return self.by_count[n]

    @staticmethod
    def rule(i):
        return (placed, lambda sizes, axis: (i, sizes, axis))


_concatenate = _Concatenate()

# ---------------------------------------------------------------- what users call


def reshape(x, *shape):
    """x with the same elements in row-major order in another shape; one extent may be -1."""
    shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    old = x.shape
    if -1 in shape:
        known = 1
        for extent in shape:
            known *= extent if extent != -1 else 1
        count = 1
        for extent in old:
            count *= extent
        if shape.count(-1) > 1 or known == 0 or count % known:
            raise ValueError(f"reshape: can't reshape {old} into {tuple(shape)}: {count} elements don't divide so")
        shape = tuple(count // known if extent == -1 else extent for extent in shape)
    return bind(_reshape, (x,), (old, tuple(shape)))


def transpose(x, *perm):
    """x with its axes in the order `perm` (default: reversed)."""
    perm = perm[0] if len(perm) == 1 and isinstance(perm[0], (tuple, list)) else perm
    n = len(x.shape)
    perm = tuple(p + n if p < 0 else p for p in perm) if perm else tuple(range(n - 1, -1, -1))
    if sorted(perm) != list(range(n)):
        raise ValueError(f"transpose: {perm} is not an order of the {n} axes of shape {x.shape}")
    return bind(_transpose, (x,), (perm,))


def swap_last(x):
    """x with its last two axes exchanged."""
    n = len(x.shape)
    return transpose(x, (*range(n - 2), n - 1, n - 2))


def concatenate(arrays, axis=0):
    """The arrays one after another along an axis that they already have."""
    arrays = list(arrays)
    if not arrays:
        raise ValueError("concatenate: needs at least one array")
    axis = axis + len(arrays[0].shape) if axis < 0 else axis
    return bind(_concatenate(len(arrays)), arrays, (tuple(a.shape[axis] for a in arrays), axis))


def split(x, sizes, axis=0):
    """x cut along `axis` into a tuple of pieces of the given sizes (torch's meaning of a list of sizes)."""
    axis = axis + len(x.shape) if axis < 0 else axis
    if sum(sizes) != x.shape[axis]:
        raise ValueError(f"split: sizes {tuple(sizes)} add up to {sum(sizes)}, axis {axis} of {x.shape} has "
                         f"{x.shape[axis]}")
    return bind(_split, (x,), (tuple(sizes), axis, x.shape))
