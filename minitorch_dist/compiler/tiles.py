"""Kernels on NumPy: an op at a time, but on a tile that stays in the cache."""

import numpy as np

from .expressions import REDUCTIONS
from .fusion import COLUMN, FULL, ROW, SCALAR, shape_of
from .ir import mapped

TILE = 32768        # elements: a few arrays of that size fit into a core's second-level cache


def run(kernel, arrays):
    """The kernel's outputs, for an array per input."""
    known = dict(zip(kernel.inputs, arrays, strict=True))
    views = {}      # (input, how it is used) -> (rows, columns) or (rows, 1)
    for node in kernel.nodes:
        for value in node.inputs:
            if value in known:
                views[value, shape_of(node)] = spread(kernel, known[value], shape_of(node))
    outs = {v: (np.zeros if kernel.roles[v] in (COLUMN, SCALAR) else np.empty)(v.shape, v.dtype)
            for v in kernel.outputs}
    flat = {v: out.reshape({FULL: (kernel.rows, kernel.columns), ROW: (kernel.rows, 1), COLUMN: (1, kernel.columns),
                            SCALAR: (1, 1)}[kernel.roles[v]]) for v, out in outs.items()}
    width = kernel.columns if ROW in kernel.roles.values() else min(TILE, kernel.columns)
    height = max(1, TILE // width)
    for top in range(0, kernel.rows, height):
        rows = slice(top, min(top + height, kernel.rows))
        for left in range(0, kernel.columns, width):
            tile(kernel, views, flat, rows, slice(left, min(left + width, kernel.columns)))
    return [outs[v] for v in kernel.outputs]


def spread(kernel, array, shape):
    """An input as its user sees it: a number for each element, or each row."""
    columns = kernel.columns if array.size and np.prod(shape) == kernel.size else 1
    return np.broadcast_to(array, shape).reshape(-1, columns)


def tile(kernel, views, outs, rows, columns):
    """Do all ops on one tile."""
    made, extent = {}, (rows.stop - rows.start, columns.stop - columns.start)
    for node in kernel.nodes:
        def part(value, node=node):
            if value in made:
                return made[value]
            view = views[value, shape_of(node)]
            return view[rows, columns] if view.shape[1] == kernel.columns else view[rows]
        role, v = kernel.roles[node.result], node.result
        if role in (COLUMN, SCALAR):        # nothing else in the kernel uses it
            outs[v][:, columns if role == COLUMN else slice(None)] += part(node.inputs[0]).sum(
                axis=0 if role == COLUMN else None, keepdims=True)
            continue
        if node.name in REDUCTIONS:
            made[v] = getattr(part(node.inputs[0]), node.name)(axis=1, keepdims=True)
        elif node.name in ("reshape", "broadcast_to"):
            made[v] = np.broadcast_to(part(node.inputs[0]), extent) if role == FULL else part(node.inputs[0])
        else:
            with np.errstate(all="ignore"):
                made[v] = node.op.forward(*mapped(node.args, part))
        if v in outs:
            outs[v][rows, columns if role == FULL else slice(None)] = made[v]
