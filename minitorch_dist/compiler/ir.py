"""The compiler's intermediate representation: a graph of ops, as data that prints.

    a : float32[64,128]   argument
    b : float32[10,128]   from elsewhere
    c : float32[128,10] = transpose(b; (1, 0))
    d : float32[64,10]  = matmul(a, c)
    return d

A Node is one op of the op table applied to Values. What an op needs beside arrays (axes, shapes) are its constants.
Arrays may stand anywhere among the arguments, inside of an index too, so arguments are nested tuples.
"""

import itertools

import numpy as np


class Value:
    """An array that a graph is given or computes.

    node, place  the Node that computes it, and which of its results it is; None, 0 where the graph is given it
    """

    __slots__ = ("shape", "dtype", "node", "place")

    def __init__(self, shape, dtype, node=None, place=0):
        self.shape, self.dtype, self.node, self.place = shape, np.dtype(dtype), node, place

    @property
    def size(self):
        """Number of elements."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    def __repr__(self):
        return f"<{kind(self)}>"


class Node:
    """One op.

    op       what has a name and a forward(*args): a Primitive, or a Call
    args     its arguments and then its constants: Values, numbers, texts, and tuples of these
    inputs   the Values among them
    results  its Values: one, or those of an op with several results, for which `rebuild` makes the forward's result a
             flat list
    """

    __slots__ = ("op", "args", "inputs", "results", "flat")

    def __init__(self, op, args, flat=None):
        self.op, self.args, self.flat, self.results = op, args, flat, ()
        self.inputs = tuple(values_in(args))

    @property
    def name(self):
        """The op's name."""
        return self.op.name

    @property
    def result(self):
        """The only result."""
        value, = self.results
        return value

    def substituted(self, replace):
        """This node with other values in the place of some of its arguments; itself where none is replaced."""
        if not any(replace.get(v, v) is not v for v in self.inputs):
            return self
        new = Node(self.op, mapped(self.args, lambda v: replace.get(v, v)), self.flat)
        new.results = tuple(Value(r.shape, r.dtype, new, r.place) for r in self.results)
        return new

    def __repr__(self):
        return f"<{self.name}>"


class Call:
    """An op that is not in the op table: a function of arrays, with a name.

    pure  whether two calls with the same arguments give the same, so that one will do
    """

    def __init__(self, name, forward, pure=True):
        self.name, self.forward, self.pure = name, forward, pure

    def __repr__(self):
        return f"<Call {self.name}>"


class Graph:
    """Values that are given, nodes in an order in which each comes after what it needs, values that are wanted."""

    def __init__(self, name, given, nodes, wanted):
        self.name, self.given, self.nodes, self.wanted = name, list(given), list(nodes), list(wanted)

    def replaced(self, replace):
        """The same graph with other values in the place of some: replace is {Value: Value}."""
        replace, nodes = dict(replace), []
        for node in self.nodes:
            nodes.append(node.substituted(replace))
            replace.update(zip(node.results, nodes[-1].results, strict=True))
        return Graph(self.name, self.given, nodes, [replace.get(v, v) for v in self.wanted])

    def users(self):
        """{Value: the nodes that need it}"""
        users = {}
        for node in self.nodes:
            for value in node.inputs:
                users.setdefault(value, []).append(node)
        return users

    def names(self):
        """{Value: its letters}"""
        results = (value for node in self.nodes for value in node.results)
        return dict(zip((*self.given, *results), letters(), strict=False))

    def __str__(self):
        names = self.names()
        width = max((len(kind(v)) for v in names), default=0)
        lines = [f"{self.name}: {len(self.nodes)} ops"]
        lines += [f"  {names[v]} : {kind(v)}" for v in self.given]
        for node in self.nodes:
            left = ", ".join(f"{names[v]} : {kind(v):{width}}" for v in node.results)
            lines.append(f"  {left} = {written(node, names)}")
        return "\n".join([*lines, f"  return {', '.join(names[v] for v in self.wanted)}"])


def values_in(tree):
    """The Values in nested tuples and lists, in order."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from values_in(part)


def mapped(tree, function):
    """Nested tuples and lists with function(value) in place of each Value."""
    if isinstance(tree, Value):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        parts = [mapped(part, function) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def kind(value):
    """A value's type as text: float32[64,10]."""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def written(node, names):
    """The right side of a node's line: matmul(a, b)."""
    def word(part):
        if isinstance(part, Value):
            return names[part]
        if isinstance(part, (tuple, list)):
            return f"({', '.join(map(word, part))}{',' * (len(part) == 1)})"
        if isinstance(part, slice):
            return ":".join("" if p is None else str(p) for p in (part.start, part.stop, part.step))
        return str(part)
    return f"{node.name}({', '.join(map(word, node.args))})"


def letters():
    """a, b, … z, aa, ab, …"""
    for n in itertools.count(1):
        yield from map("".join, itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=n))
