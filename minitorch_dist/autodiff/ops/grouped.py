"""Products of rows that lie group after group, of which each has a matrix of its own.

    x (5, n)     0 0 0 1 1           rows of group 0, of group 1        counts (3, 2, 0)
    w (3, n, m)                      a matrix per group
    y (5, m)     x[0:3] @ w[0], x[3:5] @ w[1]; nobody has come to w[2]

How many rows a group has is no shape but a value, which somebody's choices make: `counts` are Python's integers, and on
a GPU who works them out waits for it. As many products as groups that have rows: what is computed and held is what rows
there are, without padding to the largest group.
Sources: jax.lax.ragged_dot; Gale et al. 2022, "MegaBlocks: efficient sparse training with mixture-of-experts".
"""

from ... import backend
from ...backend import module_of, result_type
from ..primitive import LinearOp, Primitive, bind
from .shape import swap_last

grouped_by_matrices = LinearOp("grouped(·, w)", lambda t, r: grouped_matmul(t, *r),
                               lambda c, r: grouped_matmul(c, swap_last(r[0]), r[1]))
grouped_by_rows = LinearOp("grouped(x, ·)", lambda t, r: grouped_matmul(r[0], t, r[1]),
                           lambda c, r: grouped_outer(r[0], c, r[1]))
outer_by_right = LinearOp("grouped outer(·, y)", lambda t, r: grouped_outer(t, *r),
                          lambda c, r: grouped_matmul(r[0], swap_last(c), r[1]))
outer_by_left = LinearOp("grouped outer(x, ·)", lambda t, r: grouped_outer(r[0], t, r[1]),
                         lambda c, r: grouped_matmul(r[0], c, r[1]))


def _groups(counts):
    """[(group, its rows as a slice)] of those that have any."""
    found, first = [], 0
    for group, count in enumerate(counts):
        if count:
            found.append((group, slice(first, first + count)))
        first += count
    return found


def grouped_products(x, w, counts):
    """grouped_matmul of arrays."""
    out = module_of(x).empty((len(x), w.shape[2]), result_type(x, w))
    for group, rows in _groups(counts):
        backend.matmul(x[rows], w[group], out=out[rows])
    return out


def grouped_outer_products(x, y, counts):
    """grouped_outer of arrays."""
    out = module_of(x).zeros((len(counts), x.shape[1], y.shape[1]), result_type(x, y))
    for group, rows in _groups(counts):
        backend.matmul(x[rows].T, y[rows], out=out[group])
    return out


_grouped_matmul = Primitive("grouped_matmul", grouped_products, "x w", "counts", x=(grouped_by_matrices, "w counts"),
                            w=(grouped_by_rows, "x counts"))
_grouped_outer = Primitive("grouped_outer", grouped_outer_products, "x y", "counts", x=(outer_by_right, "y counts"),
                           y=(outer_by_left, "x counts"))


def _checked(name, counts, groups, *rows):
    counts = tuple(map(int, counts))
    if len(counts) != groups or min(counts, default=0) < 0 or any(sum(counts) != x.shape[0] for x in rows):
        raise ValueError(f"{name}: counts {counts} of {groups} groups must be 0 or more, and add up to the "
                         f"{' and '.join(str(x.shape[0]) for x in rows)} rows")
    return counts


def grouped_matmul(x, w, counts):
    """Each group's rows times its matrix: x (rows, n), w (groups, n, m) -> (rows, m), of their common dtype. counts:
    integers, how many rows each group has, one after the other. ValueError where shapes or counts don't fit."""
    if len(x.shape) != 2 or len(w.shape) != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"grouped_matmul: shapes {x.shape} and {w.shape}: they are (rows, n) and (groups, n, m)")
    return bind(_grouped_matmul, (x, w), (_checked("grouped_matmul", counts, w.shape[0], x),))


def grouped_outer(x, y, counts):
    """Of each group's rows xᵀ y: x (rows, n), y (rows, m) -> (groups, n, m), zeros for groups without rows; counts and
    errors as grouped_matmul's."""
    if len(x.shape) != 2 or len(y.shape) != 2:
        raise ValueError(f"grouped_outer: shapes {x.shape} and {y.shape}: they are (rows, n) and (rows, m)")
    return bind(_grouped_outer, (x, y), (_checked("grouped_outer", counts, len(counts), x, y),))
