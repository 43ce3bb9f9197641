"""Reading and writing by index, and sorting, which is reading by an index that the values choose."""

from ...backend import module_of, xp, zeros_like
from ..primitive import LinearOp, Primitive, bind, lower

gathered = LinearOp("gather", lambda t, r: getitem(t, r[0]), lambda c, r: scatter_add(c, *r))
scattered = LinearOp("scatter_add", lambda t, r: scatter_add(t, *r), lambda c, r: getitem(c, r[0]), fresh=False)
ordered = LinearOp("take_along_axis", lambda t, r: take_along_axis(t, *r),
                   lambda c, r: take_along_axis(c, module_of(r[0]).argsort(r[0], r[1]), r[1]))


def is_basic(index):
    """True for ints, slices, None and Ellipsis: an index that meets no element twice."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(p, (int, slice, xp.integer)) or p is None or p is Ellipsis for p in parts)


def _scatter(x, index, shape):
    out = zeros_like(x, shape)
    if is_basic(index):
        out[index] = x
    else:
        xp.add.at(out, index, x)    # an element that the index names twice gets both
    return out


_gather = Primitive("getitem", lambda x, index, shape: x[index], params="index shape",
                    x=(gathered, "index shape"))
_scatter_add = Primitive("scatter_add", _scatter, params="index shape",
                         x=(scattered, "index shape"))
_along = Primitive("take_along_axis", lambda x, order, axis: xp.take_along_axis(x, order, axis), params="order axis",
                   x=(ordered, "order axis"))


def _sort_forward(x, axis):
    order = module_of(x).argsort(x, axis=axis, kind="stable")
    return xp.take_along_axis(x, order, axis), order


_sort = Primitive("sort", _sort_forward, params="axis", aux=True, x=(ordered, "aux axis"))


def _plain(index):
    """An index with tensors in it as bare arrays, lists as arrays."""
    if isinstance(index, tuple):
        return tuple(_plain(part) for part in index)
    return xp.asarray(index) if isinstance(index, list) else lower(index)


def getitem(x, index):
    """x[index] with all of NumPy's indices: integers, slices, None, …, integer and bool arrays."""
    return bind(_gather, (x,), (_plain(index), x.shape))


def scatter_add(x, index, shape):
    """Zeros of `shape` with x added at `index` (repeated places add up): the transpose of getitem."""
    return bind(_scatter_add, (x,), (_plain(index), tuple(shape)))


def take_along_axis(x, order, axis):
    """x reordered along `axis` by a PERMUTATION of each line (integers of x's shape)."""
    return bind(_along, (x,), (lower(order), axis))


def sort(x, axis=-1):
    """x in ascending order along `axis`, stable; the gradient goes to where each element came from."""
    return bind(_sort, (x,), (axis + len(x.shape) if axis < 0 else axis,))


class At:
    """x.at[index].set(v) and .add(v): a new tensor in place of an assignment."""

    def __init__(self, x):
        self.x = x

    def __getitem__(self, index):
        return _AtIndex(self.x, _plain(index))


class _AtIndex:
    def __init__(self, x, index):
        self.x, self.index = x, index

    def add(self, value):
        """x with value added at the index; places named twice get both."""
        return self.x + scatter_add(self._fitted(value), self.index, self.x.shape)

    def set(self, value):
        """x with value at the index. Raises when an integer-array index names a place twice."""
        hit = xp.zeros(self.x.shape, xp.int64)
        xp.add.at(hit, self.index, 1)
        if hit.max(initial=0) > 1:
            raise ValueError("at[index].set: the index names some elements more than once, so the result would "
                             "depend on the order; use .add, or make the index unique")
        from .elementwise import where
        return where(hit == 1, scatter_add(self._fitted(value), self.index, self.x.shape), self.x)

    def _fitted(self, value):
        from .elementwise import astype
        from .reduction import broadcast_to
        target = lower(self.x)[self.index]
        value = value if hasattr(value, "shape") else xp.asarray(value, self.x.dtype)
        return broadcast_to(astype(value, self.x.dtype), target.shape)
