"""The order of elements, also where nobody may wait.

CuPy's sort and argsort wait for the GPU (cupy/cupy issue 9126), and nothing that waits can be part of a CUDA graph.
There an element's place is counted instead: it is the number of those that come before it.

    x        3  1  3  2          before the second 3 come 1, 2 and the first 3
    place    2  0  3  1
    order    1  3  0  2          which element has place 0, 1, 2, 3
"""

import numpy as xp

from .devices import Placeholder, module_of, on_host
from .graphs import recording, refuse_in_graph

LONGEST = 256       # elements along the axis of an order that is counted: each two are compared, some 50 bytes
FEW = 4096          # elements of which NumPy's own stable sort takes no longer than those here


def argsort(x, axis):
    """The integers that sort an array along `axis`, stable, NaN last."""
    if _is_long(x) and x.itemsize >= 4:
        return _then_ties(x, axis)
    if recording.graph is None or on_host(x) or isinstance(x, Placeholder):
        return module_of(x).argsort(x, axis=axis, kind="stable")
    if x.shape[axis] > LONGEST:
        refuse_in_graph(f"a sort of {x.shape[axis]} elements, of which CuPy waits for the end (up to {LONGEST} are "
                        "counted),")
    return counted_order(x, axis)


def _is_long(x):
    return x.__class__ is xp.ndarray and x.size >= FEW and x.dtype.kind in "iuf"


def _then_ties(x, axis):
    """np.argsort(x, axis, kind="stable") of NumPy's unstable sort, which compares several numbers at once and takes a
    fifth of the time. Afterwards the equal ones are put in order, by (number of different values before, place): a sort
    of integers that all differ."""
    x = x.swapaxes(axis, -1)
    order = x.argsort(-1)
    line = xp.take_along_axis(x, order, -1)
    left, right = line[..., :-1], line[..., 1:]
    differs = (left != right) & (left == left)          # behind NaN there is only NaN
    if (ties := ~differs.all(-1)).any():
        before = xp.zeros((ties.sum(), x.shape[-1]), int)
        xp.cumsum(differs[ties], -1, out=before[:, 1:])
        before *= x.shape[-1]
        order[ties] = xp.sort(before + order[ties], -1) - before
    return order.swapaxes(axis, -1)


def candidates(x, k, axis, largest):
    """Where along `axis` the k largest (or smallest) elements stand, from left to right, the first of equal ones: only
    these need to be sorted. None where sorting all is as good, or something is NaN."""
    if not _is_long(x) or not 0 < 4 * k <= x.shape[axis]:
        return None
    x = x.swapaxes(axis, -1)
    place = x.shape[-1] - k if largest else k - 1
    last = xp.partition(x, place, -1)[..., place, None]
    taken = x >= last if largest else x <= last
    surplus = taken.sum(-1, keepdims=True) - k
    if surplus.any():           # more are as good as the last, or there is NaN
        if x.dtype.kind == "f" and xp.isnan(x).any():
            return None
        as_good = x == last
        taken &= ~as_good | (as_good.cumsum(-1) <= as_good.sum(-1, keepdims=True) - surplus)
    return taken.nonzero()[-1].reshape(*x.shape[:-1], k).swapaxes(axis, -1)


def counted_order(x, axis):
    """argsort(x, axis) by comparing each two elements."""
    x = (x if x.ndim else x.reshape(1)).swapaxes(axis, -1)
    if not x.size:
        return module_of(x).zeros(x.shape, int).swapaxes(axis, -1)
    number = module_of(x).arange(x.shape[-1])
    mine, other = x[..., :, None], x[..., None, :]
    no_number, other_no_number = mine != mine, other != other
    before = (other < mine) | no_number & ~other_no_number
    as_good = (other == mine) | no_number & other_no_number
    place = (before | as_good & (number < number[:, None])).sum(-1)
    return (place[..., None, :] == number[:, None]).argmax(-1).swapaxes(axis, -1)
