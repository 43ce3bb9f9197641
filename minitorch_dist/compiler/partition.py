"""What backward keeps of forward, and what it does again instead."""

from .ir import Graph, Node, Value, mapped
from .rules import ELEMENTWISE, VIEWS

# Ops that cost less to do again than their result costs to keep, and to read again.
CHEAP = VIEWS | ELEMENTWISE - {"power", "exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "sigmoid", "erf", "mod",
                               "floor_divide", "sqrt", "rsqrt"}
SMALLER = 16        # times: so much smaller than a result is what may be kept in its place


def cheap(node):
    """Whether an op may be done again."""
    return node.name in CHEAP or node.name == "getitem" and len(node.inputs) == 1       # without arrays: a view


def partitioned(backward, forward, undated=()):
    """A backward graph that does again what is cheap and can be had from what it needs anyway, or from little more.

    backward  Graph of the nodes that were captured after forward; it refers to values of forward
    forward   the nodes of forward
    undated   given values that backward doesn't read unless it must

    Returns (a Graph, the values of forward that must be kept for it).
    """
    made = {value: node for node in forward for value in node.results}
    read = {v for node in backward.nodes for v in node.inputs} | set(backward.wanted)
    needed = read & made.keys()
    redoable = set()
    for node in forward:
        if cheap(node) and all(
                v in read or v in redoable or (SMALLER * v.size <= node.result.size if v in made else v not in undated)
                for v in node.inputs):
            redoable.update(node.results)
    kept, redone, stack = set(), set(), list(needed)
    while stack:
        value = stack.pop()
        if value not in redoable:
            kept.add(value)
        elif made[value] not in redone:
            redone.add(made[value])
            stack += [v for v in made[value].inputs if v in made]
    replace, nodes = {}, []
    for node in forward:
        if node in redone:
            copy = Node(node.op, mapped(node.args, lambda v: replace.get(v, v)), node.flat)
            copy.results = tuple(Value(r.shape, r.dtype, copy, r.place) for r in node.results)
            replace.update(zip(node.results, copy.results, strict=True))
            nodes.append(copy)
    rest = Graph(backward.name, backward.given, backward.nodes, backward.wanted).replaced(replace)
    return (Graph(backward.name, backward.given, [*nodes, *rest.nodes], rest.wanted),
            [v for node in forward for v in node.results if v in kept])
