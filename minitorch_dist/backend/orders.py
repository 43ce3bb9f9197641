"""The order of elements, also where nobody may wait.

CuPy's sort and argsort wait for the GPU (cupy/cupy issue 9126), and nothing that waits can be part of a CUDA graph.
There an element's place is counted instead: it is the number of those that come before it.

    x        3  1  3  2          before the second 3 come 1, 2 and the first 3
    place    2  0  3  1
    order    1  3  0  2          which element has place 0, 1, 2, 3
"""

from .devices import Placeholder, module_of, on_host
from .graphs import recording, refuse_in_graph

LONGEST = 256       # elements along the axis of an order that is counted: each two are compared, some 50 bytes


def argsort(x, axis):
    """The integers that sort an array along `axis`, stable, NaN last."""
    if recording.graph is None or on_host(x) or isinstance(x, Placeholder):
        return module_of(x).argsort(x, axis=axis, kind="stable")
    if x.shape[axis] > LONGEST:
        refuse_in_graph(f"a sort of {x.shape[axis]} elements, of which CuPy waits for the end (up to {LONGEST} are "
                        "counted),")
    return counted_order(x, axis)


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
