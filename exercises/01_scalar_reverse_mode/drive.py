"""How the answers of this chapter are called."""

import sys
from collections.abc import Sequence

EXPRESSIONS = {
    "a + b": lambda a, b, n: a + b,
    "a - b": lambda a, b, n: a - b,
    "a * b": lambda a, b, n: a * b,
    "a / b": lambda a, b, n: a / b,
    "a ** n": lambda a, b, n: a ** n,
    "a.tanh()": lambda a, b, n: a.tanh(),
    "a.exp()": lambda a, b, n: a.exp(),
    "a * a": lambda a, b, n: a * a,
    "n - a": lambda a, b, n: n - a,
    "a / n": lambda a, b, n: a / n,
}


def slope(made, node, above=()):
    """∂made/∂node: the local derivative of a parent; of what an operation made of others (a − b as a + (−1)·b), the sum
    over all ways."""
    if made is node:
        return 1.0
    for local in made.local:
        if callable(local):
            raise TypeError("a local derivative is a function; it is a number, known when the operation runs")
    if len(made.parents) != len(made.local):
        raise ValueError(f"{len(made.parents)} parents, but {len(made.local)} local derivatives: one for each parent")
    return sum(local * slope(parent, node, (*above, made))
               for parent, local in zip(made.parents, made.local, strict=True) if parent not in above)


def Value(learner, inputs, run):     # noqa: N802, the name of the exercise's object
    """The number and the derivatives of each expression, by the names of its operands; and a and b afterwards."""
    a, b = learner(inputs["a"]), learner(inputs["b"])
    values, local = {}, {}
    for text, expression in EXPRESSIONS.items():
        made = expression(a, b, inputs["n"])
        if not isinstance(made, learner):
            kind = "None (is there a return?)" if made is None else f"a {type(made).__name__}"
            raise TypeError(f"{text} is a Value: yours is {kind}")
        values[text] = made.data
        local[text] = {name: slope(made, node) for name, node in (("a", a), ("b", b))
                       if name in text.replace("tanh", "")}
    return {"values": values, "local": local, "operands": {"a": a.data, "b": b.data}}


class Node:
    """A node of a graph, without a number. Into `limits` goes Python's limit of recursion whenever its parents are
    read."""

    def __init__(self, name, parents, limits):
        self.name, self.found, self.limits = name, tuple(parents), limits

    @property
    def parents(self):
        self.limits.add(sys.getrecursionlimit())
        return self.found

    @parents.setter
    def parents(self, others):
        self.found = others


def order(learner, inputs, run):
    """The names of the nodes in the orders that two calls returned, whether these are lists or the like, whether
    Python's limit of recursion was raised for a while or for good, and the numbers of every node's parents afterwards.

    parents[i]: the numbers of node i's parents
    """
    nodes, limit, limits = [], sys.getrecursionlimit(), set()
    for name, parents in enumerate(inputs["parents"]):
        nodes.append(Node(name, (nodes[i] for i in parents), limits))
    orders = [learner(nodes[-1]) for _ in range(2)]
    first, again = ([getattr(node, "name", repr(node)) for node in found] for found in orders)
    return {"order": first, "again": again, "listed": all(isinstance(found, Sequence) for found in orders),
            "deeper": max({sys.getrecursionlimit()} | limits) > limit,
            "graph": [[parent.name for parent in node.parents] for node in nodes]}


OPERATIONS = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
              "div": lambda a, b: a / b, "tanh": lambda a: a.tanh(), "exp": lambda a: a.exp()}


def backward(learner, inputs, run):
    """All nodes' gradients: of the last node, of it again, and then of the node `second`; and in which orders. Then of
    what is made now, of twice the last node."""
    value, order = run.earlier["Value"], run.earlier["order"]
    nodes = [value(x) for x in inputs["leaves"]]
    for op, *which in inputs["program"]:
        nodes.append(OPERATIONS[op](*(nodes[i] for i in which)))
    number = {node: i for i, node in enumerate(nodes)}
    outputs = {"orders": []}
    for name, root in (("grads", nodes[-1]), ("again", nodes[-1]), ("second", nodes[inputs["second"]])):
        learner(root, order)
        outputs[name] = [node.grad for node in nodes]
        outputs["orders"].append([number[node] for node in order(root) if node in number])
    learner(nodes[-1] + nodes[-1], order)
    return outputs | {"values": [node.data for node in nodes], "twice": [node.grad for node in nodes]}
