"""Kernels on NumPy: an op at a time, but on a tile that stays in the cache."""

import numpy as np

from .expressions import REDUCTIONS
from .fusion import COLUMN, FULL, ROW, SCALAR, shape_of
from .ir import Value

TILE = 65536       # elements: a few arrays of that size fit into a core's second-level cache


class Tiles:
    """A kernel as a list of NumPy calls on slots: first the inputs, as each user sees them, then the ops' results."""

    def __init__(self, kernel):
        self.kernel, self.pairs = kernel, []        # (input, shape of its user)
        for node in kernel.nodes:
            self.pairs += [(v, shape_of(node)) for v in node.inputs if v in kernel.inputs]
        self.pairs = list(dict.fromkeys(self.pairs))
        slots = {pair: i for i, pair in enumerate(self.pairs)} | {
            node.result: len(self.pairs) + i for i, node in enumerate(kernel.nodes)}
        self.whole = [kernel.size == np.prod(shape, dtype=int) for _, shape in self.pairs]
        self.calls = []     # (role, function, arguments, which of them are slots, the output or None)
        for node in kernel.nodes:
            args = [slots[a] if a in slots else slots[a, shape_of(node)] if isinstance(a, Value) else a
                    for a in (node.args if node.name not in (*REDUCTIONS, "reshape", "broadcast_to") else node.inputs)]
            where = [i for i, a in enumerate(node.args[:len(args)]) if isinstance(a, Value)]
            role, out = kernel.roles[node.result], kernel.outputs.index(node.result) \
                if node.result in kernel.outputs else None
            self.calls.append((role, self._function(node, role), args, where, out))
        last = {slot: i for i, (_, _, args, where, _) in enumerate(self.calls) for slot in (args[w] for w in where)}
        # A temporary that is freed at once leaves its place in the cache to the next one.
        self.ends = [[slot for slot, end in last.items() if end == i] for i in range(len(self.calls))]

    def _function(self, node, role):
        if role in (COLUMN, SCALAR):
            axis = 0 if role == COLUMN else None
            return lambda x: x.sum(axis=axis, keepdims=True)
        if node.name in REDUCTIONS:
            method = node.name
            return lambda x: getattr(x, method)(axis=1, keepdims=True)
        if node.name == "reshape":
            return lambda x: x
        if node.name == "broadcast_to":
            return lambda x: x if x.shape[1] != 1 or role == ROW else np.broadcast_to(x, (len(x), self.width))
        return node.op.forward

    def __call__(self, arrays):
        """The kernel's outputs, for an array per input."""
        kernel = self.kernel
        known = dict(zip(kernel.inputs, arrays, strict=True))
        views = [np.broadcast_to(known[v], shape).reshape(-1, kernel.columns if whole else 1)
                 for (v, shape), whole in zip(self.pairs, self.whole, strict=True)]
        outs = [(np.zeros if kernel.roles[v] in (COLUMN, SCALAR) else np.empty)(v.shape, v.dtype)
                for v in kernel.outputs]
        shapes = {FULL: (kernel.rows, kernel.columns), ROW: (kernel.rows, 1), COLUMN: (1, kernel.columns),
                  SCALAR: (1, 1)}
        flat = [out.reshape(shapes[kernel.roles[v]]) for v, out in zip(kernel.outputs, outs, strict=True)]
        width = kernel.columns if ROW in kernel.roles.values() else min(TILE, kernel.columns)
        height = max(1, TILE // width)
        with np.errstate(all="ignore"):
            for top in range(0, kernel.rows, height):
                for left in range(0, kernel.columns, width):
                    self._tile(views, flat, slice(top, top + height), slice(left, min(left + width, kernel.columns)))
        return outs

    def _tile(self, views, outs, rows, columns):
        self.width = columns.stop - columns.start
        values = [view[rows, columns] if whole else view[rows]
                  for view, whole in zip(views, self.whole, strict=True)]
        for (role, function, args, where, out), ends in zip(self.calls, self.ends, strict=True):
            args = list(args)
            for i in where:
                args[i] = values[args[i]]
            made = function(*args)
            values.append(made)
            args = None
            for slot in ends:
                values[slot] = None
            if out is None:
                continue
            if role == COLUMN:
                outs[out][:, columns] += made
            elif role == SCALAR:
                outs[out] += made
            else:
                outs[out][rows, columns if role == FULL else slice(None)] = made
