"""Gradients of programs that are given as text: by steps, and by a tape in which one thing may be wrong."""

import numpy as np

from .formulas import matmul_gradients, spread, undo

# ---------------------------------------------------------------- by steps

def run_program(case, leaves):
    """The value of a case's program by NumPy; the leaves may be complex."""
    names = {"tanh": np.tanh, "np": np, "turn": np.transpose, "long": lambda x, y: x + 3000 * y,
             "total": lambda x, axis=None, keepdims=False: np.sum(x, axis, keepdims=keepdims)}
    return eval(case["program"], names | leaves)


def upstream_of(case, value, name="gradient"):
    return np.ones(np.shape(value)) if case[name] is None else case[name]


def by_steps(case, derivative, upstream="gradient"):
    """Gradients of Σ upstream · value, by the name of that in the case. derivative(f) of a function of a step, for each
    element of each leaf."""
    found = {}
    for name, array in case["leaves"].items():
        found[name] = np.zeros(array.shape)
        for index in np.ndindex(array.shape):
            unit = np.zeros(array.shape)
            unit[index] = 1.0
            slope = derivative(lambda h, name=name, array=array, unit=unit: run_program(
                case, case["leaves"] | {name: array + h * unit}))
            found[name][index] = (upstream_of(case, slope, upstream) * slope).sum()
    return found


def complex_step(f):
    """To all digits, as in chapter 2."""
    return np.imag(f(1e-30j)) / 1e-30


def central_difference(f, h=1e-5):
    """To some ten digits, and without a trick."""
    return (np.real(f(h)) - np.real(f(-h))) / (2 * h)


# ---------------------------------------------------------------- a tape like the learner's

class Node:
    def __init__(self, data, how, parents=(), pull=None):
        self.data, self.how, self.parents, self.pull, self.kept = np.asarray(data), how, parents, pull, None

    def made(self, data, others, pull):
        return Node(data, self.how, (self, *others), pull)

    def __add__(self, other):
        return self.made(self.data + other.data, (other,), lambda g: (fit(g, self), fit(g, other)))

    def __mul__(self, other):
        of_self, of_other = (self, other) if self.how.get("crossed") else (other, self)
        fitted = (lambda g, node: g) if self.how.get("unfitted") else fit
        return self.made(self.data * other.data, (other,), lambda g: (fitted(g * of_self.data, self),
                                                                      fitted(g * of_other.data, other)))

    def __matmul__(self, other):
        def pull(g):
            both = matmul_gradients(exchanged=self.how.get("exchanged", False))
            return tuple(both({"gradient": g, "x": self.data, "y": other.data}).values())
        return self.made(self.data @ other.data, (other,), pull)

    def __getitem__(self, index):
        def pull(g):
            out = np.zeros(self.data.shape)
            np.add.at(out, index, g)
            return (out,)
        return self.made(self.data[index], (), pull)

    def tanh(self):
        out = np.tanh(self.data)
        slope = 1 - (self.data if self.how.get("tanh of x") else out) ** 2
        return self.made(out, (), lambda g: (slope if self.how.get("no chain") else g * slope,))

    def sum(self, axis=None, keepdims=False):
        how = {"axis": repr(axis), "keepdims": repr(keepdims), "x": self.data}
        return self.made(self.data.sum(axis=axis, keepdims=keepdims), (), lambda g: (spread(how, g),))

    def transpose(self, axes=None):
        back = axes and tuple(np.argsort(axes))
        return self.made(self.data.transpose(axes), (), lambda g: (g.transpose(back),))


def fit(g, node):
    return g if g.shape == node.data.shape else undo(g, node.data.shape)


def depth_first(root):
    """Parents before what was made from them."""
    found, stack = {}, [root]
    while stack:
        node = stack[-1]
        missing = [parent for parent in node.parents if parent not in found]
        stack += missing
        if not missing:
            found[stack.pop()] = True
    return list(found)


def breadth_first(root):
    """Nearest to the root last, whoever else waits for it."""
    found = {root: True}
    for node in (queue := [root]):
        new = [parent for parent in node.parents if parent not in found]
        found |= dict.fromkeys(new, True)
        queue += dict.fromkeys(new)
    return list(found)[::-1]


def with_tape(**how):
    """What a tape gives that works like this; {} is right."""
    def outputs(case):
        leaves = {name: Node(array, how) for name, array in case["leaves"].items()}
        names = {"tanh": Node.tanh, "total": Node.sum, "turn": Node.transpose, "np": np, "long": long_chain}
        root = eval(case["program"], names | leaves)
        grads, found = {}, {"value": root.data}
        for name, upstream in (("once", "gradient"), ("twice", "second")):
            gradient = np.array(upstream_of(case, root.data, upstream))
            if how.get("replaced"):
                grads = {}
            try:
                walk(root, np.ones_like(gradient) if how.get("upstream") else gradient, how, grads)
            except ValueError:
                return None
            found[name] = {leaf: np.array(grads[node]) if node in grads else None for leaf, node in leaves.items()}
        return found
    return outputs


def walk(root, gradient, how, grads):
    gradients = {root: gradient}
    for node in reversed(breadth_first(root) if how.get("breadth") else depth_first(root)):
        if node not in gradients:
            continue
        g = gradients.pop(node)
        if how.get("stale"):
            g = node.kept = g if node.kept is None or node is root else node.kept + g
        if node.pull is None:
            if how.get("doubled") and node in grads:
                g = grads[node]
            grads[node] = g if how.get("stale") or node not in grads else grads[node] + g
            continue
        pairs = list(zip(node.parents, node.pull(g), strict=True))
        for parent, part in dict(pairs).items() if how.get("merged") else pairs:
            if parent not in gradients or how.get("assigned"):
                gradients[parent] = part
            elif how.get("in place"):
                gradients[parent] += part
            else:
                gradients[parent] = gradients[parent] + part


def long_chain(x, y):
    for _ in range(3000):
        x = x + y
    return x
