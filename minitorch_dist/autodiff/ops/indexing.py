"""Reading and writing by index, and sorting, which is reading by an index that the values choose."""

import math

from ... import backend, kernels
from ...backend import (
    DEVICE_ARRAYS,
    check_devices,
    in_float32,
    is_array,
    is_floating,
    is_half,
    module_of,
    on_host,
    refuse,
    to_device_of,
    whole,
    wholes,
    xp,
    zeros_like,
)
from ..dispatch import with_params
from ..primitive import LinearOp, Primitive, bind, lower, state
from .elementwise import astype, constant, where
from .shape import reshape

# Their indices were checked when the op was called, and are where its arrays are.
gathered = LinearOp("gather", lambda t, r: _gathering(t, (r[0], t.shape)), lambda c, r: bind(_scatter_add, (c,), r))
scattered = LinearOp("scatter_add", lambda t, r: bind(_scatter_add, (t,), r),
                     lambda c, r: _gathering(c, (r[0], c.shape)), fresh=False)
ordered = LinearOp("reorder", lambda t, r: reorder(t, *r),
                   lambda c, r: reorder(c, _back(*r), r[1]))


def _back(order, axis):
    """The order that undoes a permutation of each line."""
    if not isinstance(order, xp.ndarray):
        return backend.argsort(order, axis)
    back, places = xp.empty_like(order), xp.arange(order.shape[axis], dtype=order.dtype)
    xp.put_along_axis(back, order, places.reshape((-1,) + (1,) * (order.ndim - axis % order.ndim - 1)), axis)
    return back


def is_basic(index):
    """True for ints, slices, None and Ellipsis: an index that meets no element twice."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(p, (int, slice, xp.integer)) or p is None or p is Ellipsis for p in parts)


def _scatter(x, index, shape):
    parts = index if isinstance(index, tuple) else (index,)
    if kernels.usable(x) and is_floating(x.dtype) and (lines := as_lines(parts, shape)):
        # CuPy's add.at is atomic: its bits differ from run to run.
        rows, count = lines[0] if len(lines) == 1 else flat_index(lines, shape), math.prod(shape[:len(lines)])
        return kernels.load("segment_sums").segment_sums(_spread(x, rows, lines, shape), rows, count).reshape(shape)
    basic = is_basic(index)
    if not basic and x.itemsize == 2 and is_half(x):
        return in_float32(_scatter, x, index, shape)
    out = zeros_like(x, shape)
    if basic:
        out[index] = x
    elif not on_host(x):
        if not is_floating(x.dtype) and x.dtype.itemsize < 4:        # CuPy's add.at knows no integers of fewer bits
            return _scatter(x.astype(xp.int32), index, shape).astype(x.dtype)
        module_of(out).add.at(out, index, x)     # an element that the index names twice gets both
    elif x.size < 256 or len(parts) > len(shape) or not all(is_array(p) and p.dtype.kind in "iu" for p in parts):
        xp.add.at(out, index, x)
    else:       # the same on flat arrays, where NumPy is five times faster
        rows = flat_index(parts, shape)
        inner = math.prod(shape[len(parts):])
        places = rows.ravel() if inner == 1 else (rows.reshape(-1, 1) * inner + xp.arange(inner)).ravel()
        xp.add.at(out.reshape(-1), places, (x if x.size == places.size else _spread(x, rows, parts, shape)).ravel())
    return out


def _spread(x, rows, parts, shape):
    """x with the shape that the index selects: it may be smaller, and broadcast."""
    selected = *rows.shape, *shape[len(parts):]
    return x if x.shape == selected else xp.broadcast_to(x, selected)


def as_lines(parts, shape):
    """Arrays of integers, one for each of the first axes of `shape`, that select what the index selects: x[:, i] is
    x[arange(n)[:, None], i]. None where there are no such ones."""
    whole = next((i for i, p in enumerate(parts) if not isinstance(p, slice)), len(parts))
    arrays = parts[whole:]
    if not arrays or len(parts) > len(shape) or not all(is_array(p) and p.dtype.kind in "iu" for p in arrays) or any(
            p != slice(None) for p in parts[:whole]):
        return None
    ndim = max(p.ndim for p in arrays)
    return [xp.arange(n, like=arrays[0]).reshape((n,) + (1,) * (whole - i - 1 + ndim))
            for i, n in enumerate(shape[:whole])] + list(arrays)


def flat_index(parts, shape):
    """Integer arrays that index the first axes of `shape`, as one array of row-major places."""
    rows = 0
    for part, extent in zip(parts, shape, strict=False):
        if on_host(part) and part.size and not (-extent <= part.min() and part.max() < extent):     # else: see _placed
            raise IndexError(f"indices from {part.min()} to {part.max()} are out of range for {extent} elements")
        part = part.astype(xp.int64, copy=False)    # places need more bits than indices
        rows = rows * extent + xp.where(part < 0, part + extent, part)
    return rows


_gather = Primitive("getitem", lambda x, index, shape: x[index], params="index shape",
                    x=(gathered, "index shape"))
_gathering = with_params(_gather)
_scatter_add = Primitive("scatter_add", _scatter, params="index shape",
                         x=(scattered, "index shape"))
_reorder = Primitive("reorder", lambda x, order, axis: xp.take_along_axis(x, order, axis), params="order axis",
                     x=(ordered, "order axis"))


def _order(x, axis):
    """The integers that sort a raw array, stable."""
    if x.itemsize == 2 and is_half(x):
        return _order(x.astype(xp.float32), axis)       # (in_float32 leaves what lies on a mesh as it is)
    return backend.argsort(x, axis)


def _falling(x, axis):
    """The integers that put a raw array's largest elements first, stable: read backwards twice. (In order of -x neither
    unsigned integers nor the least of the others would stand where they belong.)"""
    return x.shape[axis] - 1 - xp.flip(_order(xp.flip(x, axis), axis), axis)


def _sort_forward(x, axis):
    order = _order(x, axis)
    return xp.take_along_axis(x, order, axis), order


_sort = Primitive("sort", _sort_forward, params="axis", aux=True, x=(ordered, "aux axis"))


def _plain(index):
    """An index with tensors in it as bare arrays, lists as arrays."""
    if isinstance(index, tuple):
        return tuple([_plain(part) for part in index])
    return xp.asarray(index, None if index else xp.intp) if isinstance(index, list) else lower(index)


def _placed(index, x, shape):
    """A plain index beside x: for an x on a GPU its arrays are brought there, and checked against `shape`, the one that
    is indexed, because CuPy takes a place out of range modulo the extent."""
    array = lower(x)
    if not DEVICE_ARRAYS:
        return index
    parts, axis = index if isinstance(index, tuple) else (index,), 0
    if on_host(array):
        check_devices("indexing", (array, *parts))
        return index
    parts = tuple(to_device_of(p, array) if is_array(p) else p for p in parts)
    for i, part in enumerate(parts):
        if part is Ellipsis:    # the axes behind it are counted from the end
            axis = len(shape) - sum(taken(p) for p in parts[i + 1:])
        elif is_array(part) and part.dtype.kind in "iu" and part.size and axis < len(shape):
            extent = shape[axis]
            refuse(outside(part, -extent, extent), IndexError(
                f"an index on axis {axis} of shape {tuple(shape)} is out of range: {-extent} to {extent - 1}"))
        if part is not Ellipsis:
            axis += taken(part)
    return parts if isinstance(index, tuple) else parts[0]


def located(index, x):
    """Any index of x with bare arrays in it, which are where x is, and checked as in _placed."""
    return _placed(_plain(index), x, x.shape)


def taken(part):
    """How many axes a part of an index consumes."""
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if is_array(part) and part.dtype.kind == "b" else 1


def getitem(x, index):
    """x[index] with all of NumPy's indices: integers, slices, None, …, integer and bool arrays."""
    index = _plain(index)
    if DEVICE_ARRAYS:       # never, on a machine without a GPU
        index = _placed(index, x, x.shape)
    return _gathering(x, (index, x.shape))


def scatter_add(x, index, shape):
    """Zeros of `shape` with x added at `index` (repeated places add up): the transpose of getitem."""
    return bind(_scatter_add, (x,), (_placed(_plain(index), x, shape), wholes("shape", shape)))


def reorder(x, order, axis):
    """x reordered along `axis` by a PERMUTATION of each line (integers of x's shape); take_along_axis takes any
    integers."""
    return bind(_reorder, (x,), (lower(order), axis))


def _axis(axis, shape):
    axis = whole("axis", axis)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis {axis} is out of range for shape {shape}")
    return axis % len(shape)


def take(x, indices, axis=None):
    """The elements of x at integer `indices` along `axis` (None: of the flattened x), as np.take."""
    if axis is None:
        x, axis = reshape(x, (-1,) if x.size else (0,)), 0
    axis, indices = _axis(axis, x.shape), list(indices) if isinstance(indices, tuple) else indices
    return getitem(x, (slice(None),) * axis + (indices,) if axis else indices)


def take_along_axis(x, indices, axis=-1):
    """x[…, indices[…, j, …], …] along `axis`: integers of x's number of axes, repeated ones allowed; the other axes
    broadcast, as in np.take_along_axis."""
    indices, axis = lower(indices), _axis(axis, x.shape)
    if len(indices.shape) != len(x.shape) or indices.dtype.kind not in "iu":
        raise ValueError(f"take_along_axis: indices of shape {indices.shape} and dtype {indices.dtype} for x of shape "
                         f"{x.shape}: they must be integers with as many axes")
    lines = [xp.arange(n, like=indices).reshape((-1,) + (1,) * (len(x.shape) - i - 1)) for i, n in enumerate(x.shape)]
    lines[axis] = indices
    return getitem(x, tuple(lines))


def sort(x, axis=-1):
    """x in ascending order along `axis`, stable; the gradient goes to where each element came from."""
    return bind(_sort, (x,), (_axis(axis, x.shape),))


def argsort(x, axis=-1):
    """The integers that sort x along `axis`, stable; they have no derivative."""
    return constant(_order(lower(x), axis), x)


def topk(x, k, dim=-1, largest=True):
    """(values, indices) of the k largest (or smallest) elements along `dim`, best first, as in torch. Among equal ones
    the first wins, and NaN is larger than all numbers. Gradients go to the chosen elements; the indices have none."""
    axis = _axis(dim, x.shape)
    k = whole("k", k)
    if not 0 <= k <= x.shape[axis]:
        raise ValueError(f"topk: k is {k}, but axis {dim} of {x.shape} has {x.shape[axis]} elements")
    raw, order = lower(x), _falling if largest else _order
    if (few := backend.candidates(raw, k, axis, largest)) is None:
        indices = order(raw, axis)[(slice(None),) * axis + (slice(0, k),)]
    else:
        indices = xp.take_along_axis(few, order(xp.take_along_axis(raw, few, axis), axis), axis)
    return take_along_axis(x, indices, axis), constant(indices, x)


def one_hot(labels, num_classes, dtype=xp.float32):
    """1 at each label, 0 elsewhere: integers (…) -> (…, num_classes). A constant.

    Raises ValueError on labels outside of 0 … num_classes-1, TypeError where that is no integer.
    """
    num_classes = whole("num_classes", num_classes)
    raw = numbers_in(labels)
    check_numbers("one_hot", raw, num_classes, "labels", "classes")
    return constant((raw[..., None] == module_of(raw).arange(num_classes)).astype(backend.as_dtype(dtype)), labels)


def embedding(input, weight):
    """Rows of weight (n, …) at integer `input` (…): -> (…, *weight.shape[1:]). The gradient of a row is the sum over
    its uses. Raises ValueError on numbers outside of 0 … n-1."""
    input = numbers_in(input)
    check_numbers("embedding", input, weight.shape[0])
    return _gathering(weight, (to_device_of(input, lower(weight)), weight.shape))


def numbers_in(x):
    """Integers as a raw array: of an array, a list, or a number."""
    if not isinstance(x, (list, tuple, int)):
        return lower(x)
    numbers = xp.asarray(x)
    return numbers if numbers.size else numbers.astype(xp.intp)     # (of nothing NumPy makes float64)


def check_numbers(name, numbers, count, what="numbers", kinds="rows", ignore=None):
    """TypeError unless raw `numbers` are integers, ValueError unless they lie in 0 … count-1 or are `ignore` (see
    backend.refuse)."""
    given, numbers = numbers, getattr(numbers, "here", numbers)     # of what is cut (parallel/sharding) a part
    if numbers.dtype.kind not in "iu":
        raise TypeError(f"{name}: {what} of dtype {numbers.dtype}; they must be integers")
    if not on_host(numbers):
        refuse(outside(numbers, 0, count, ignore), ValueError(
            f"{name}: some of the {what} are out of range: there are {count} {kinds}, 0 to {count - 1}"))
        return

    def counted(numbers):
        return numbers if ignore is None else numbers[numbers != ignore]
    here = counted(numbers)
    bad = bool(here.size and not (0 <= here.min() and here.max() < count))
    if numbers is not given and (bad := given.anywhere(bad)):
        here = counted(given.whole())
    if bad:
        raise ValueError(f"{name}: {what} from {here.min()} to {here.max()}, but there are {count} {kinds}: "
                         f"0 to {count - 1}")


def outside(numbers, low, high, ignore=None):
    """0-d bool: whether some of an array of integers lie outside of low … high-1, and are not `ignore`: one launch on a
    GPU. Where there is no kernel for it: seen without sign, what is below low is above all that is allowed, so that one
    comparison does for both ends."""
    if state.capture is None and kernels.usable(numbers):       # what is compiled makes its own kernels
        kernel = kernels.load("outside")
        if kernel.fits(numbers, ignore):
            return kernel.outside(numbers, low, high, ignore)
    if ignore is not None:
        numbers = xp.where(numbers == ignore, low, numbers)
    if numbers.dtype.kind == "u":
        return (numbers.astype(xp.uint64, copy=False) >= high).any()
    wide = numbers.astype(xp.int64, copy=False)
    return ((wide - low if low else wide).view(xp.uint64) >= high - low).any()


class At:
    """x.at[index].set(v) and .add(v): a new tensor in place of an assignment."""

    def __init__(self, x):
        self.x = x

    def __getitem__(self, index):
        return _AtIndex(self.x, located(index, self.x))


class _AtIndex:
    def __init__(self, x, index):
        self.x, self.index = x, index

    def add(self, value):
        """x with value added at the index; places named twice get both."""
        return self.x + scatter_add(self._fitted(value), self.index, self.x.shape)

    def set(self, value):
        """x with value at the index. Raises when an integer-array index names a place twice."""
        hit = zeros_like(lower(self.x), dtype=xp.int32)     # (CuPy can't add at places of int64)
        module_of(hit).add.at(hit, self.index, 1)
        refuse((hit > 1).any(), ValueError("at[index].set: the index names some elements more than once, so the result "
                                           "would depend on the order; use .add, or make the index unique"))
        return where(hit == 1, scatter_add(self._fitted(value), self.index, self.x.shape), self.x)

    def _fitted(self, value):
        from .reduction import broadcast_to
        target = lower(self.x)[self.index]
        value = value if hasattr(value, "shape") else to_device_of(xp.asarray(value, self.x.dtype), target)
        more = len(value.shape) - len(target.shape)
        if more > 0 and value.shape[:more] == (1,) * more:      # as NumPy's assignment takes it
            value = reshape(value, value.shape[more:])
        value = astype(value, self.x.dtype)
        return value if value.shape == target.shape else broadcast_to(value, target.shape)
