"""Passes: a graph in, a graph out that computes the same with less. Each can be printed before and after.

Floating-point results stay what they are, to the last bit: nothing is reassociated.
"""

from collections import Counter

from ..autodiff.primitive import OPS
from ..backend import is_floating, result_type
from .ir import Call, Graph, Node, Value


def live(graph):
    """Without ops whose results nobody needs."""
    needed, nodes = set(graph.wanted), []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.results) or not pure(node):
            nodes.append(node)
            needed.update(node.inputs)
    return Graph(graph.name, graph.given, reversed(nodes), graph.wanted)


def common(graph):
    """Ops that are the same on the same arguments, done once."""
    seen, replace, nodes = {}, {}, []
    for old in graph.nodes:
        node = old.substituted(replace)
        key = (id(node.op), identity(node.args))
        first = seen.setdefault(key, node) if pure(node) else node
        if first is node:
            nodes.append(node)
        replace.update(zip(old.results, first.results, strict=True))
    return Graph(graph.name, graph.given, nodes, [replace.get(v, v) for v in graph.wanted])


def simple(graph):
    """Ops by simpler ones: REWRITES, from the first op to the last."""
    replace, nodes, given = {}, [], set(graph.given)
    uses = Counter([*(v for node in graph.nodes for v in node.inputs), *graph.wanted])

    def made_by(value, name, alone=False):
        """The node that makes a value, if it is such an op of this graph; alone: and nobody else needs the value."""
        node = value.node if isinstance(value, Value) and value not in given else None
        return node if node is not None and node.name == name and not (alone and uses[value] > 1) else None

    def new(op, args, shape):
        node = Node(OPS[op], args)
        node.results = (Value(shape, node.args[0].dtype, node),)
        nodes.append(node)
        return node.result
    for old in graph.nodes:
        node = old.substituted(replace)
        uses.update({new: uses[v] for v, new in zip(old.results, node.results, strict=True) if v is not new})
        rewrite = REWRITES.get(node.name)
        instead = rewrite(node, new, made_by) if rewrite else None
        if instead is None:
            nodes.append(node)
            replace.update(zip(old.results, node.results, strict=True))
        else:
            replace[old.result] = instead
    return Graph(graph.name, graph.given, nodes, [replace.get(v, v) for v in graph.wanted])


PASSES = (simple, common, live)


def optimized(graph):
    """The graph after all passes."""
    for step in PASSES:
        graph = step(graph)
    return graph


# ---------------------------------------------------------------- what is simpler: a value that is there, or None

def _reshape(node, new, made_by):
    x, old, shape = node.args
    if x.shape == tuple(shape):
        return x
    before = made_by(x, "reshape")
    return before and new("reshape", (before.args[0], before.args[1], shape), tuple(shape))


def _transpose(node, new, made_by):
    x, order = node.args
    if tuple(order) == tuple(range(len(order))):
        return x
    before = made_by(x, "transpose")
    if before is None:
        return _transposed_product(made_by(x, "matmul", alone=True), new, made_by) if tuple(order) == (1, 0) else None
    source, order = before.args[0], tuple(before.args[1][i] for i in order)
    return source if order == tuple(range(len(order))) else new("transpose", (source, order), node.result.shape)


def _transposed_product(product, new, made_by):
    """(x @ y)ᵀ = yᵀ @ xᵀ: as linear's own pullback makes a weight's gradient, which then needs no copy."""
    if product is None or any(len(v.shape) != 2 or v.dtype != product.result.dtype for v in product.args):
        return None
    turned = []
    for v in reversed(product.args):
        before = made_by(v, "transpose")
        turned.append(before.args[0] if before else new("transpose", (v, (1, 0)), v.shape[::-1]))
    return new("matmul", tuple(turned), product.result.shape[::-1])


def _broadcast(node, new, made_by):
    x, _, shape = node.args
    return x if x.shape == tuple(shape) else None


def _power(node, new, made_by):
    x, exponent = node.args
    number = not isinstance(exponent, Value) and isinstance(x, Value) and is_floating(x.dtype) and (
        node.result.dtype == x.dtype)       # (np.float64(2) would make float64 of float32)
    if number and exponent in (2, 3, 4):
        square = new("square", (x,), x.shape)
        return square if exponent == 2 else new("mul", (square, x if exponent == 3 else square), x.shape)
    if number and exponent == 0.5:
        return new("sqrt", (x,), x.shape)
    return x if number and exponent == 1 else None


def _times_one(node, new, made_by):
    """x · 1 and x / 1, where that changes neither shape nor dtype."""
    x, y = node.args
    if node.name == "mul" and not isinstance(x, Value):
        x, y = y, x
    alike = isinstance(x, Value) and (x.shape, x.dtype) == (node.result.shape, node.result.dtype)
    return x if alike and not isinstance(y, Value) and type(y) in (int, float) and y == 1 else None


def _cast(node, new, made_by):
    """A cast there and back, where nothing is lost on the way."""
    x, _, dtype = node.args
    before = made_by(x, "astype")
    if before is not None and (source := before.args[0]).dtype == dtype \
            and is_floating(source.dtype) and is_floating(x.dtype) and result_type(source, x) == x.dtype:
        return source
    return x if x.dtype == dtype else None


REWRITES = {"reshape": _reshape, "transpose": _transpose, "broadcast_to": _broadcast, "power": _power,
            "mul": _times_one, "div": _times_one, "astype": _cast}


def pure(node):
    """Whether an op gives the same for the same arguments."""
    return not isinstance(node.op, Call) or node.op.pure


def identity(tree):
    """What two equal arguments have in common, and no two others."""
    if isinstance(tree, (tuple, list)):
        return (type(tree), *map(identity, tree))
    if isinstance(tree, Value):
        return id(tree)
    if isinstance(tree, slice):
        return (slice, tree.start, tree.stop, tree.step)
    return type(tree), repr(tree)
