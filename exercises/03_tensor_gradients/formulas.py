"""Gradients as formulas in NumPy, right ones and those with a known mistake in them."""

import numpy as np

# ---------------------------------------------------------------- 03.1: g brought back to a shape

def stretched(shape, lead=0):
    """The axes of extent 1."""
    return tuple(i + lead for i, extent in enumerate(shape) if extent == 1)


def added_in_front(g, shape):
    return g.sum(axis=tuple(range(g.ndim - len(shape))))


def kept_from_behind(g, shape):
    g = g.sum(axis=tuple(range(len(shape), g.ndim)))
    return g.sum(axis=stretched(shape), keepdims=True)


def one_in_front(g, shape):
    g = g.sum(axis=0) if g.ndim > len(shape) else g
    return g.sum(axis=tuple(i + g.ndim - len(shape) for i in stretched(shape)), keepdims=True)


def mean(g, shape):
    return averaged(undo(g, shape), g.size / undo(g, shape).size)


def mean_in_front(g, shape):
    return averaged(undo(g, shape), np.prod(g.shape[:g.ndim - len(shape)]))


def mean_of_stretched(g, shape):
    return averaged(undo(g, shape), np.prod([g.shape[axis] for axis in stretched(shape, g.ndim - len(shape))]))


def averaged(total, count):
    with np.errstate(invalid="ignore"):      # nan of none
        return total / np.float64(count)


def first_copy(g, shape):
    for _ in range(g.ndim - len(shape)):
        g = g[0]
    return g[tuple(slice(0, 1) if extent == 1 else slice(None) for extent in shape)]


def more_than_1(g, shape):
    g = added_in_front(g, shape)
    return g.sum(axis=tuple(axis for axis in stretched(shape) if g.shape[axis] > 1), keepdims=True)


def no_stretched_is_all(g, shape):
    """The empty tuple was taken for nothing."""
    return added_in_front(g, shape).sum(axis=stretched(shape) or None, keepdims=True)


def none_is_all(g, shape):
    g = g.sum(axis=tuple(range(g.ndim - len(shape))) or None)
    return g.sum(axis=stretched(shape) or None, keepdims=True)


def scalars_forgotten(g, shape):
    return added_in_front(g, shape).sum(axis=stretched(shape), keepdims=True) if shape else g


# ---------------------------------------------------------------- 03.2

def undo(g, shape, final=None):
    """Reduced to the shape of a matrix, then to that of the vector that it was."""
    out = added_in_front(g, shape).sum(axis=stretched(shape), keepdims=True)
    return out if final is None else out.reshape(final)


def named(of_x, of_y):
    return {"the gradient of x": of_x, "the gradient of y": of_y}


def swapped(a):
    return a.swapaxes(-1, -2)


def matmul_gradients(transposed=swapped, reduce=undo, exchanged=False, upstream=True, of_x=None, of_y=None):
    """The rule, and what it gives with a mistake in it."""
    def outputs(case):
        g, x, y = case["gradient"], case["x"], case["y"]
        g = g if upstream else np.ones_like(g)
        row, column = x[None, :] if x.ndim == 1 else x, y[:, None] if y.ndim == 1 else y
        g = g[..., None] if y.ndim == 1 else g
        g = g[..., None, :] if x.ndim == 1 else g
        found = (reduce(of_x(g, column) if of_x else g @ transposed(column), row.shape, x.shape),
                 reduce(of_y(row, g) if of_y else transposed(row) @ g, column.shape, y.shape))
        return named(*found[::-1] if exchanged else found)
    return outputs


def not_transposed(case):
    g, x, y = case["gradient"], case["x"], case["y"]
    return named(undo(g @ y, x.shape), undo(x @ g, y.shape))


def left_for_right(case):
    """The factors in the order of the scalar rule: other · gradient on both sides."""
    g, x, y = case["gradient"], case["x"], case["y"]
    return named(undo(swapped(y) @ g, x.shape), undo(g @ swapped(x), y.shape))


def elementwise(case):
    g, x, y = case["gradient"], case["x"], case["y"]
    return named(undo(g * y, x.shape), undo(g * x, y.shape))


# ---------------------------------------------------------------- 03.3

def argument(case, name):
    return eval(case[name], {"np": np})


def reduced(case):
    return {"axis": argument(case, "axis"), "keepdims": argument(case, "keepdims")}


def spread(case, g):
    """The gradient of a reduction, copied to all elements."""
    how = reduced(case)
    if how["axis"] is not None and not how["keepdims"]:
        g = np.expand_dims(g, how["axis"])
    return np.broadcast_to(g, case["x"].shape)


def one_by_one(arranged):
    """Dropped axes put back singly, a tuple's in this order."""
    def expanded(case, g):
        how = reduced(case)
        if how["axis"] is not None and not how["keepdims"]:
            for axis in arranged(np.atleast_1d(how["axis"]).tolist()):
                g = np.expand_dims(g, axis)
        return np.broadcast_to(g, case["x"].shape)
    return expanded


def maxima_unexpanded(case, g):
    mask = case["x"] == case["x"].max(axis=argument(case, "axis"))
    with np.errstate(invalid="ignore"):      # where none was found
        return spread(case, g) * shares(mask, case)


def maxima_of_all(case, g):
    with np.errstate(invalid="ignore"):      # where none was found
        return spread(case, g) * shares(case["x"] == case["x"].max(), case)


def winners(case, x=None):
    """A mask of the maxima of x, by default the case's own."""
    x = case["x"] if x is None else x
    return x == x.max(axis=argument(case, "axis"), keepdims=True)


def shares(mask, case):
    """Equal parts of 1 for what is marked, along the axis."""
    return mask / mask.sum(axis=argument(case, "axis"), keepdims=True)


def first_winner(case):
    """A mask of one maximum each: the first in the order of the axes."""
    x, axis = case["x"], argument(case, "axis")
    axes = tuple(range(x.ndim)) if axis is None else tuple(np.atleast_1d(axis) % x.ndim)
    mask, seen = np.zeros(x.shape, bool), set()
    for index in np.ndindex(x.shape):
        line = tuple(i for k, i in enumerate(index) if k not in axes)
        if winners(case)[index] and line not in seen:
            seen.add(line)
            mask[index] = True
    return mask


def written(case, g):
    out = np.zeros(case["x"].shape)
    index = argument(case, "index")
    out[index] = g
    return out


def summing(formula):
    """A mistake in the sum's rule, and in that of max where it is built upon it."""
    def outputs(case):
        if case["rule"] not in ("sum", "max"):
            return None
        found = formula(case, case["gradient"])
        if case["rule"] == "max":
            found = found * shares(winners(case), case)
        return {"result": found}
    return outputs
