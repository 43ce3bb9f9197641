"""Which ops become one kernel.

A kernel walks over rows · columns elements. What it computes has one of four roles:

    FULL    a number at each element
    ROW     one per row: a sum or maximum over the columns, and what is made of such; the row's elements may use it
    COLUMN  one per column: a sum over all rows; complete only at the end, so nothing in the kernel uses it
    SCALAR  one: a sum over everything; likewise

       columns →
    rows  x x x x | Σ → ROW          softmax, layer norm, cross-entropy and their backwards are one kernel each:
      ↓   x x x x | Σ                a row is read, summed, normalised while it is in the cache
          ------- ---
    COLUMN Σ Σ Σ Σ  SCALAR

An op joins the kernel of one of its inputs, or one that reads the same inputs, if it fits the kernel's rows and columns
and if nothing that it needs has to wait for that kernel.
"""

from .expressions import REDUCTIONS, expressible
from .ir import kind, letters, written
from .rules import VIEWS, count

NEAR = 8            # kernels that an op or a kernel tries to join
LIMIT = 100         # ops in a kernel: a C compiler takes long over more
FULL, ROW, COLUMN, SCALAR = "full", "row", "column", "scalar"


class Kernel:
    """Ops that run as one loop.

    nodes     in order
    size      rows · columns
    columns   None as long as nothing in it asks for a certain number
    roles     {result: role}
    inputs    the values that it reads, as keys, each once
    outputs   the results that others need
    reshaped  {result of a reshape that others need: the output whose elements it has}
    """

    def __init__(self, size):
        self.nodes, self.size, self.columns, self.roles = [], size, None, {}
        self.inputs, self.outputs, self.reshaped = {}, [], {}

    @property
    def rows(self):
        """How many rows there are."""
        return self.size // self.columns

    @property
    def name(self):
        """The names of its ops."""
        return "+".join(node.name for node in self.nodes)

    def add(self, node, role, columns):
        """Take an op in; `fits` has found its role."""
        self.nodes.append(node)
        self.inputs.update((v, None) for v in node.inputs if v not in self.roles)
        self.roles[node.result] = role
        self.columns = columns

    def fits(self, node):
        """(role of the node's result, columns), or None where it can't be a part of this kernel."""
        inside = {v: self.roles[v] for v in node.inputs if v in self.roles}
        if len(self.nodes) >= LIMIT:
            return None
        if COLUMN in inside.values() or SCALAR in inside.values():
            return None
        found = (self._reduction if node.name in REDUCTIONS else self._reshape if node.name == "reshape"
                 else self._elementwise)(node, inside)
        if found is None or found[1] == self.columns:
            return found
        shapes = [v.shape for v, role in self.roles.items() if role == FULL]    # a number of columns is fixed now
        return found if all(split(shape, found[1]) is not None for shape in shapes) else None

    def _reduction(self, node, inside):
        x = node.inputs[0]
        axes, ndim = reduced(node), len(x.shape)
        k = len(axes)
        if inside.get(x) == ROW:
            return (SCALAR, self.columns) if k == ndim and node.name == "sum" else None
        if x.size != self.size or self.columns is not None and split(x.shape, self.columns) is None:
            return None
        if k == ndim:
            return (SCALAR, self.columns) if node.name == "sum" else None
        if axes == tuple(range(ndim - k, ndim)):
            role, columns = ROW, count(x.shape[ndim - k:])
        elif axes == tuple(range(k)) and node.name == "sum":
            role, columns = COLUMN, count(x.shape[k:])
        else:
            return None
        return (role, columns) if self.columns in (None, columns) else None

    def _reshape(self, node, inside):       # of a value of this kernel: the loop is the same
        role = inside.get(node.inputs[0])
        if role == FULL and self.columns is not None and split(node.result.shape, self.columns) is None:
            return None
        return role and (role, self.columns)

    def _elementwise(self, node, inside):
        out = node.result
        if node.name == "broadcast_to" and not inside:      # a view
            return None
        if out.size == self.size and (self.columns is None or split(out.shape, self.columns) is not None):
            for value, role in inside.items():
                if role == ROW and not one_per_row(value.shape, out.shape, self.columns):
                    return None
            return FULL, self.columns
        if self.columns is not None and out.size == self.rows and set(inside.values()) <= {ROW}:
            return ROW, self.columns
        return None

    def finish(self, needed):
        """All ops are in it; `needed` are the values that somebody else needs."""
        same = {}       # result of a reshape -> what was reshaped
        for node in self.nodes:
            if node.name == "reshape":
                same[node.result] = same.get(node.inputs[0], node.inputs[0])
        self.reshaped = {v: same[v] for v in self.roles if v in needed and v in same}
        self.outputs = [v for v in self.roles if v in needed and v not in same or v in self.reshaped.values()]
        if self.columns is None:
            self.columns = self._widest()

    def _widest(self):
        """As many columns as leave each input either spread over them all, or the same for all."""
        shapes = {shape for node in self.nodes for shape in [shape_of(node)] if count(shape) == self.size}
        pairs = [(v.shape, shape_of(node)) for node in self.nodes for v in node.inputs
                 if v not in self.roles and count(shape_of(node)) == self.size]
        first = next(iter(shapes))
        for k in range(len(first), 0, -1):
            columns = count(first[len(first) - k:])
            if all(split(s, columns) is not None for s in shapes) and all(all_or_one(v, s, columns) for v, s in pairs):
                return columns
        return 1 if not first or not all(split(s, first[-1]) is not None for s in shapes) else first[-1]

    def __str__(self):
        return f"kernel of {self.rows} rows · {self.columns} columns: {len(self.nodes)} ops"


def fusable(node):
    """Whether an op can be a part of a kernel."""
    return (len(node.results) == 1 and not node.flat and all(v.size for v in (*node.inputs, *node.results))
            and expressible(node))


def reduced(node):
    """The axes of a reduction, as a tuple."""
    axes, ndim = node.args[2], len(node.inputs[0].shape)
    return tuple(range(ndim)) if axes is None else axes if isinstance(axes, tuple) else (axes,)


def shape_of(node):
    """The shape that a node walks over."""
    return node.inputs[0].shape if node.name in REDUCTIONS else node.result.shape


def split(shape, columns):
    """How many of the last axes make up `columns` elements; None where none do."""
    size = 1
    for k in range(len(shape) + 1):
        if size == columns:
            return k
        if k < len(shape):
            size *= shape[len(shape) - k - 1]
    return None


def one_per_row(shape, full, columns):
    """Whether broadcasting `shape` to `full` repeats each of its elements over one row."""
    k = split(full, columns)
    padded = (1,) * (len(full) - len(shape)) + shape
    return k is not None and padded[:len(full) - k] == full[:len(full) - k] and set(padded[len(full) - k:]) <= {1}


def all_or_one(shape, full, columns):
    """Whether an input of `shape` has, over the columns, either all elements or one."""
    k = split(full, columns)
    if k is None:
        return False
    padded = (1,) * (len(full) - len(shape)) + shape
    last = padded[len(full) - k:]
    return last == full[len(full) - k:] or set(last) <= {1}


# ---------------------------------------------------------------- who joins whom

def fused(graph):
    """Kernels and the nodes that stay by themselves, in an order to run them in."""
    item_of, items, readers, users = {}, [], {}, graph.users()
    for node in graph.nodes:
        home = _home(node, item_of, readers) if fusable(node) else None
        if home is None:
            home = node
            if fusable(node) and node.name not in VIEWS:
                home = _begin(node) or node
            items.append(home)
        for result in node.results:
            item_of[result] = home
        if isinstance(home, Kernel):
            for value in node.inputs:
                readers.setdefault(value, []).append(home)
    items = _merged(items, item_of)
    wanted = set(graph.wanted)
    for kernel in items:
        if isinstance(kernel, Kernel):
            mine = set(kernel.nodes)
            kernel.finish({v for v in kernel.roles if v in wanted or any(u not in mine for u in users.get(v, ()))})
    # What raises goes first: an index that is out of range must not be used before.
    items = sorted(items, key=lambda item: isinstance(item, Kernel) or item.name != "check")
    return Schedule(graph, _ordered(items, item_of))


def _begin(node):
    """A new kernel with this op as its first."""
    kernel = Kernel(count(shape_of(node)))
    found = kernel.fits(node)
    if found is None:
        return None
    kernel.add(node, *found)
    return kernel


def _home(node, item_of, readers):
    """The kernel that an op joins, or None."""
    near = [item_of[v] for v in reversed(node.inputs) if v in item_of]
    near += [kernel for v in node.inputs if v.size == count(shape_of(node)) and node.name != "reshape"
             for kernel in readers.get(v, ())[:-NEAR - 1:-1]]
    for kernel in dict.fromkeys(near):
        if isinstance(kernel, Kernel) and (found := kernel.fits(node)):
            outside = [item_of[v] for v in node.inputs if v in item_of and item_of[v] is not kernel]
            if not _waits(outside, kernel, item_of):
                kernel.add(node, *found)
                return kernel
    return None


def _merged(items, item_of):
    """Kernels that read what another one makes, or the same, made one with it where they fit."""
    items, readers = dict.fromkeys(items), {}       # {value: the kernels that read it}

    def enter(kernel):
        for value in kernel.inputs:
            readers.setdefault(value, []).append(kernel)
    todo = [item for item in items if isinstance(item, Kernel)]
    for kernel in todo:
        enter(kernel)
    while todo:
        kernel = todo.pop()
        if kernel not in items:
            continue
        makers = [item_of[v] for v in kernel.inputs if v in item_of]
        near = makers + [k for v in kernel.inputs if v.size == kernel.size for k in readers[v]]
        near = [k for k in dict.fromkeys(near) if isinstance(k, Kernel) and k is not kernel and k in items
                and k.size == kernel.size and len(k.nodes) + len(kernel.nodes) <= LIMIT]
        for other in near[:NEAR]:
            one = _one(kernel, other)
            if one is not None and not _between(kernel, other, item_of):
                del items[kernel], items[other]
                items[one] = None
                item_of.update((v, one) for v in one.roles)
                enter(one)
                todo.append(one)
                break
    return list(items)


def _one(first, second):
    """The kernel of the ops of two, or None."""
    both = Kernel(first.size)
    for node in _in_order([*first.nodes, *second.nodes]):
        if (found := both.fits(node)) is None:
            return None
        both.add(node, *found)
    return both


def _in_order(nodes):
    """Nodes, each after those that it needs."""
    mine = {v: node for node in nodes for v in node.results}
    done, order = set(), []

    def visit(node):
        if node not in done:
            done.add(node)
            for v in node.inputs:
                if v in mine:
                    visit(mine[v])
            order.append(node)
    for node in nodes:
        visit(node)
    return order


def _between(first, second, item_of):
    """Whether something else must run after one of two kernels and before the other."""
    def outside(kernel, other):
        return [item_of[v] for v in kernel.inputs if v in item_of and item_of[v] not in (kernel, other)]
    return _waits(outside(first, second), second, item_of) or _waits(outside(second, first), first, item_of)


def _waits(items, kernel, item_of):
    """Whether one of the items needs, at whatever distance, what the kernel computes."""
    stack, seen = list(items), set()
    while stack:
        item = stack.pop()
        if item is kernel:
            return True
        if item not in seen:
            seen.add(item)
            stack += [item_of[v] for v in item.inputs if v in item_of]
    return False


def _ordered(items, item_of):
    """The items, each after those that it needs."""
    order, begun = {}, set()
    for item in items:
        stack = [item]
        while stack:
            top = stack[-1]
            missing = [] if top in order else [
                i for i in (item_of[v] for v in top.inputs if v in item_of) if i not in order and i is not top]
            if not missing:
                order[stack.pop()] = None
            elif top in begun:
                raise RuntimeError(f"{top} needs {missing[0]}, which needs it")
            else:
                begun.add(top)
                stack += missing
    return list(order)


class Schedule:
    """A graph and the order of its items: Kernels, and Nodes that are run as they are."""

    def __init__(self, graph, items):
        self.graph, self.items = graph, items

    @property
    def kernels(self):
        """The kernels, in order."""
        return [item for item in self.items if isinstance(item, Kernel)]

    def __str__(self):
        names = dict(zip((*self.graph.given, *(v for item in self.items for node in nodes_of(item)
                                                for v in node.results)), letters(), strict=False))
        width = max((len(kind(v)) for v in names), default=0)
        lines = [f"{self.graph.name}: {len(self.kernels)} kernels, {len(self.items) - len(self.kernels)} other ops"]
        lines += [f"  {names[v]} : {kind(v)}" for v in self.graph.given]
        for item in self.items:
            kernel = isinstance(item, Kernel)
            lines += [f"  {item}"] * kernel
            kept = {*item.outputs, *item.reshaped} if kernel else ()
            for node in nodes_of(item):
                left = ", ".join(f"{names[v]} : {kind(v):{width}}" for v in node.results)
                note = f"    ({item.roles[node.result]}{', kept' * (node.result in kept)})" if kernel else ""
                lines.append(f"  {'  ' * kernel}{left} = {written(node, names)}{note}")
        return "\n".join([*lines, f"  return {', '.join(names[v] for v in self.graph.wanted)}"])


def nodes_of(item):
    """The nodes of a kernel, or the node itself."""
    return item.nodes if isinstance(item, Kernel) else [item]
