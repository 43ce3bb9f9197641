"""Reverse mode out of forward mode: linearize, then transpose.

Run dual numbers with the primal known and the tangent unknown. The nonlinear
work is done there and then; of the tangents' journey a linear program is left:

    >>> import numpy as np, minitorch_dist as mt
    >>> y, program = mt.linearize(lambda x: mt.sum(mt.sin(x) * 2.0), np.ones(3))
    >>> print(program)
    linear program of 1 input
      a : float64[3]
      b = scale(a; float64[3])
      c = scale(b; 2.0)
      d = sum(c; float64[])
      return d : float64[]

Read downwards it is forward mode, for any tangent. Read upwards, each line by
its transpose, it is reverse mode: there is no third way to differentiate.
Source: Radul et al. 2023, "You only linearize once"; the JAX "autodidax".
"""

import itertools

from ..backend import xp
from .forward import Dual
from .ops.reduction import broadcast_to
from .ops.shape import Bundle
from .primitive import LinearOp, Traced, lower
from .reverse import check_cotangent, new_level, run
from .tensor import Leaf
from .tree import flatten
from .writes import tick


class Equation:
    """One line of a linear program: the sum over `terms` of LinearOp(parent; residual).

    It stands where a Node of the tape stands, and for the backward pass it is
    its own primitive, so that transposing a program is the one loop in reverse.run.
    """

    saved = ()
    name = "equation of a linear program"
    layout = ()

    def __init__(self, terms, shape, dtype):
        self.terms, self.shape, self.dtype, self.date = terms, shape, dtype, tick()
        self.parents = [parent for _, parent, _ in terms]
        self.pulls = tuple(lambda ct, saved, linear=linear, residual=residual: linear.transpose(ct, residual)
                           for linear, _, residual in terms)
        self.fresh = (False,) * len(terms)
        self.primitive = self

    def apply(self, values):
        """This line's value, given {parent: value}."""
        parts = [linear.apply(values[parent], residual) for linear, parent, residual in self.terms]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return broadcast_to(total, self.shape)


class LinVar(Traced):
    """An unknown tangent: it has a shape and a dtype, and an equation instead of numbers."""

    __slots__ = ("node", "level")

    def __init__(self, node, level):
        self.node, self.level = node, level

    shape = property(lambda self: self.node.shape)
    dtype = property(lambda self: self.node.dtype)

    def lowered(self):
        # For code that only asks for shape, dtype or module: zeros without memory.
        return xp.broadcast_to(xp.zeros((), self.dtype), self.shape)

    def __repr__(self):
        return f"LinVar({self.dtype}{list(self.shape)}, level={self.level})"

    @staticmethod
    def process(primitive, args, params, level):
        return extend(primitive, args, params, level)


def extend(primitive, args, params, level):
    """A primitive applied to unknown tangents: legal only where it is linear in them."""
    if primitive.definition:
        return primitive.definition(*args, *params)
    unknown = [a.__class__ is LinVar and a.level == level for a in args]
    saved = (None, *args, *params)
    depends = {0} | {i for i, u in enumerate(unknown, 1) if u}      # places of values that aren't known yet
    terms = []
    for i, (a, u, rule) in enumerate(zip(args, unknown, primitive.rules, strict=True)):
        if u:
            if rule is None or depends & set(rule.places):
                raise TypeError(f"{primitive.name!r} is not linear in its input {i}: only linear functions can be "
                                "transposed; differentiate it first, with linearize")
            terms.append((rule.linear, a.node, rule.residual(saved)))
        elif rule is not None and not depends & set(rule.places) and xp.any(lower(a)):
            raise TypeError(f"{primitive.name!r} adds a constant to a tangent: that is affine, not linear")
    # The shape of the result, by running the forward on zeros that take no memory.
    example = primitive.forward(*[lower(a) for a in args], *params)
    example = example[0] if primitive.aux else example
    if not primitive.multi:
        return LinVar(Equation(terms, example.shape, example.dtype), level)
    return tuple(LinVar(Equation([_part(*term, k, len(example)) for term in terms], e.shape, e.dtype), level)
                 for k, e in enumerate(example))


def _part(linear, parent, residual, k, count):
    """Output k of a LinearOp that has several, as a term of its own."""
    part = LinearOp(f"{linear.name}[{k}]", lambda t, r: linear.apply(t, r)[k],
                    lambda c, r: linear.transpose(Bundle.one(c, k, count), r), linear.fresh, listed=False)
    return part, parent, residual


class LinearProgram:
    """A linear function as data. Call it with tangents to run it forwards; `transpose` runs it backwards.

    inputs   leaves, one per input array; their shapes and dtypes
    outputs  per output array its equation or leaf, or None where it doesn't depend on the inputs
    """

    def __init__(self, inputs, outputs, examples, rebuild_in, rebuild_out):
        self.inputs, self.outputs, self.examples = inputs, outputs, examples
        self._rebuild_in, self._rebuild_out = rebuild_in, rebuild_out

    @property
    def equations(self):
        """The lines in order."""
        seen, stack = set(), [n for n in self.outputs if n is not None]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack.extend(node.parents)
        return sorted((n for n in seen if n.primitive is not None), key=lambda n: n.date)

    def __call__(self, *tangents):
        """The outputs for these tangents (nested like the inputs)."""
        values, _ = flatten(tangents)
        for t, leaf in zip(values, self.inputs, strict=True):
            check_cotangent(t, leaf.shape, leaf.dtype)
        known = dict(zip(self.inputs, values, strict=True))
        for equation in self.equations:
            known[equation] = equation.apply(known)
        return self._rebuild_out([_zeros(e) if n is None else known[n]
                                  for n, e in zip(self.outputs, self.examples, strict=True)])

    def transpose(self, *cotangents):
        """The inputs' cotangents (a tuple nested like the inputs) for these cotangents of the outputs."""
        cts, _ = flatten(cotangents)
        for ct, e in zip(cts, self.examples, strict=True):
            check_cotangent(ct, e.shape, e.dtype)
        found = {}
        run([(n, ct) for n, ct in zip(self.outputs, cts, strict=True) if n is not None], retain=True, into=found)
        return self._rebuild_in([found[leaf] if leaf in found else _zeros(leaf) for leaf in self.inputs])

    def __str__(self):
        names = dict(zip(self.inputs, _letters(), strict=False))
        letters = itertools.islice(_letters(), len(self.inputs), None)
        lines = [f"linear program of {len(self.inputs)} input{'s' * (len(self.inputs) != 1)}"]
        lines += [f"  {names[leaf]} : {_type(leaf)}" for leaf in self.inputs]
        for equation in self.equations:
            names[equation] = next(letters)
            terms = [names[parent] if linear.name == "same" else f"{linear.name}({names[parent]}{_residual(residual)})"
                     for linear, parent, residual in equation.terms]
            lines.append(f"  {names[equation]} = {' + '.join(terms)}")
        outputs = [f"{names[n]} : {_type(n)}" if n is not None else f"0 : {_type(e)}"
                   for n, e in zip(self.outputs, self.examples, strict=True)]
        return "\n".join([*lines, f"  return {', '.join(outputs)}"])


def _letters():
    """a, b, … z, aa, ab, …"""
    for n in itertools.count(1):
        yield from map("".join, itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=n))


def _type(value):
    return f"{value.dtype}{list(value.shape)}".replace(" ", "")


def _residual(residual):
    if residual is None:
        return ""
    if hasattr(residual, "dtype"):
        return f"; {_type(residual)}"
    if isinstance(residual, tuple):
        return "; " + ", ".join(_type(r) if hasattr(r, "dtype") and getattr(r, "ndim", 0) else str(r).replace(" ", "")
                                for r in residual)
    return f"; {residual}"


def _zeros(like):
    return xp.zeros(like.shape, like.dtype)


def linearize(f, *primals):
    """(f(*primals), program): the derivative of f at the primals as a LinearProgram.

    The function runs once; the program may then be called, and transposed, many times.
    """
    from .transforms import _array
    values, rebuild = flatten(primals)
    values = [_array(v, f"input {i}") for i, v in enumerate(values)]
    with new_level() as level, new_level() as tangent_level:
        leaves = [Leaf(v.shape, v.dtype) for v in values]
        duals = [Dual(v, LinVar(leaf, tangent_level), level) for v, leaf in zip(values, leaves, strict=True)]
        out = f(*rebuild(duals))
    outs, rebuild_out = flatten(out)
    live = [y.__class__ is Dual and y.level == level for y in outs]
    nodes = [y.tangent.node if alive and y.tangent.__class__ is LinVar else None
             for y, alive in zip(outs, live, strict=True)]
    ys = [y.primal if alive else y for y, alive in zip(outs, live, strict=True)]
    return rebuild_out(ys), LinearProgram(leaves, nodes, ys, rebuild, rebuild_out)


def linear_transpose(f, *examples):
    """The transpose of a LINEAR function f of arrays shaped like the examples (their values don't matter):
    a function from cotangents of f's output to a tuple of cotangents like the examples.

    Raises TypeError, naming the op, where f is not linear.
    """
    values, rebuild = flatten(examples)
    with new_level() as level:
        leaves = [Leaf(v.shape, v.dtype) for v in values]
        out = f(*rebuild([LinVar(leaf, level) for leaf in leaves]))
    outs, rebuild_out = flatten(out)
    nodes = [y.node if y.__class__ is LinVar and y.level == level else None for y in outs]
    program = LinearProgram(leaves, nodes, outs, rebuild, rebuild_out)
    return program.transpose
