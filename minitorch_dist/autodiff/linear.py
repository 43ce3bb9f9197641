"""Reverse mode out of forward mode: linearize, then transpose.

Run dual numbers with the primal known and the tangent unknown. The nonlinear
work is done there and then; what remains to be done to tangents is a linear program:

    >>> import numpy as np, minitorch_dist as mt
    >>> y, program = mt.linearize(lambda x: mt.sum(mt.sin(x) * 2.0), np.ones(3))
    >>> print(program)
    linear program of 1 input
      a : float64[3]
      b : float64[3] = scale(a; float64[3])
      c : float64[3] = scale(b; 2.0)
      d : float64[]  = sum(c)
      return d

Behind a semicolon stands what the nonlinear run has left: here cos x, and the
factor 2. Read downwards the program is forward mode, for any tangent. Read
upwards, each line by its transpose, it is reverse mode.

    >>> print(program.T)
    linear program of 1 input
      a : float64[]
      b : float64[3] = broadcast(a)
      c : float64[3] = scale(b; 2.0)
      d : float64[3] = scale(c; float64[3])
      return d

Source: Radul et al. 2023, "You only linearize once"; the JAX "autodidax".
"""

import itertools
import re
from collections import Counter

from ..backend import xp, zeros_like
from .forward import Dual
from .ops.elementwise import astype
from .ops.reduction import at_shape
from .ops.shape import Bundle
from .primitive import LinearOp, Traced, lower, mode, state
from .reverse import check_cotangent, check_stale, new_level, run
from .tensor import Leaf
from .transforms import _array, _outputs, apart, check_function
from .tree import flatten
from .writes import log, tick


class Input(Leaf):
    """An input (or an example of an output) of a linear program; `zero` is 0-d, of its dtype and on its device."""

    __slots__ = ("zero",)

    def __init__(self, like):
        super().__init__(like.shape, like.dtype)
        self.zero = like.zero if isinstance(like, Input) else zeros_like(lower(like), (), like.dtype)


class Equation:
    """One line of a linear program: the sum over `terms` of LinearOp(parent; residual).

    It stands where a Node of the tape stands, and for the backward pass it is
    its own primitive, so that transposing a program is the one loop in reverse.run.
    """

    def __init__(self, terms, example):
        self.terms, self.shape, self.dtype, self.date = terms, example.shape, example.dtype, tick()
        self.zero = zeros_like(example, ())
        self.parents = [parent for _, parent, _ in terms]
        self.name = " + ".join(linear.name for linear, _, _ in terms)
        # What check_stale looks at: a residual may be an array of the user's, and be overwritten.
        residuals = [flatten(residual) for _, _, residual in terms]
        ends = [0, *itertools.accumulate(len(leaves) for leaves, _ in residuals)]
        self.saved = tuple(leaf for leaves, _ in residuals for leaf in leaves)
        self.layout = ("residual",) * len(self.saved)
        self.pulls = tuple(_pull(linear, build, slice(*its)) for (linear, _, _), (_, build), its in zip(
            terms, residuals, itertools.pairwise(ends), strict=True))
        self.fresh = (False,) * len(terms)

    def empty(self):
        """Let go of the residuals, which somebody else keeps: only transposing works then, once `saved` is set."""
        self.saved = self.terms = None

    primitive = property(lambda self: self)     # an attribute would be a reference cycle

    def apply(self, values):
        """This line's value, given {parent: value}."""
        if log.newest > self.date:
            check_stale(self, self.saved, "linear program's")
        parts = [linear.apply(values[parent], residual) for linear, parent, residual in self.terms]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return astype(at_shape(total, self.shape), self.dtype)


def _pull(linear, build, its):
    """A term's transpose. saved[its] has the arrays of its residual, which `build` puts together again."""
    return lambda ct, saved: linear.transpose(ct, build(saved[its]))


class LinVar(Traced):
    """An unknown tangent: it has a shape and a dtype, and an equation instead of numbers."""

    __slots__ = ("node", "level")

    def __init__(self, node, level):
        self.node, self.level = node, level

    shape = property(lambda self: self.node.shape)
    dtype = property(lambda self: self.node.dtype)

    def lowered(self):
        # For code that only asks for shape, dtype or module: zeros without memory.
        return xp.broadcast_to(self.node.zero, self.shape)

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
        elif rule is not None and a is not None and not depends & set(rule.places) and xp.any(lower(a)):
            raise TypeError(f"{primitive.name!r} adds a constant to a tangent: that is affine, not linear")
    # The shape of the result, by running the forward on zeros that take no memory.
    example = primitive.forward(*[lower(a) for a in args], *params)
    example = example[0] if primitive.aux else example
    if not primitive.multi:
        return LinVar(Equation(terms, example), level)
    return tuple(LinVar(Equation([_part(*term, k, len(example)) for term in terms], e), level)
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
        self.inputs, self.outputs = inputs, outputs
        self.examples = [Input(e) for e in examples]     # the outputs' shapes and dtypes
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
        if state.autocast is not None:      # each line has its dtype
            with mode(autocast=None):
                return self(*tangents)
        values, _ = flatten(tangents)
        _check(values, self.inputs, "inputs", "tangents")
        known, equations = dict(zip(self.inputs, values, strict=True)), self.equations
        left = Counter(parent for equation in equations for parent in equation.parents)
        left.update(n for n in self.outputs if n is not None)
        for equation in equations:
            known[equation] = equation.apply(known)
            for parent in equation.parents:     # forward mode's memory doesn't grow with the program's length
                left[parent] -= 1
                if not left[parent]:
                    del known[parent]
        return self._rebuild_out(apart([_zeros(e) if n is None else known[n]
                                        for n, e in zip(self.outputs, self.examples, strict=True)], values))

    def transpose(self, *cotangents):
        """The inputs' cotangents (a tuple nested like the inputs) for these cotangents of the outputs."""
        cts, _ = flatten(cotangents)
        _check(cts, self.examples, "outputs", "cotangents")
        found = {}
        run([(n, ct) for n, ct in zip(self.outputs, cts, strict=True) if n is not None], retain=True, into=found)
        return self._rebuild_in(apart([found[leaf] if leaf in found else _zeros(leaf) for leaf in self.inputs], cts))

    @property
    def T(self):
        """The transposed program, one input for each output of this one."""
        return trace_linear(self.transpose, *self.examples)

    def __str__(self):
        names = dict(zip(self.inputs, _letters(), strict=False))
        letters = itertools.islice(_letters(), len(self.inputs), None)
        equations = self.equations
        names.update(zip(equations, letters, strict=False))
        width = max((len(_type(n)) for n in equations), default=0)
        lines = [f"linear program of {len(self.inputs)} input{'s' * (len(self.inputs) != 1)}"]
        lines += [f"  {names[leaf]} : {_type(leaf)}" for leaf in self.inputs]
        for n in equations:
            terms = [_term(linear, names[parent], residual, {parent.shape, n.shape})
                     for linear, parent, residual in n.terms]
            lines.append(f"  {names[n]} : {_type(n):{width}} = {' + '.join(terms)}")
        outputs = [names[n] if n is not None else f"0 : {_type(e)}"
                   for n, e in zip(self.outputs, self.examples, strict=True)]
        return "\n".join([*lines, f"  return {', '.join(outputs)}"])


def _letters():
    """a, b, … z, aa, ab, …"""
    for n in itertools.count(1):
        yield from map("".join, itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=n))


def _type(value):
    return f"{value.dtype}{list(value.shape)}".replace(" ", "")


def _term(linear, name, residual, shapes):
    """One LinearOp as text: scale(a; float64[3]), matmul(a, float64[3,2])."""
    if linear.name == "same":
        return name
    if "·" in linear.name:      # its name says where the input stands
        return re.sub(r"\b[a-z]\b", _word(residual), linear.name).replace("·", name)
    parts = residual if isinstance(residual, tuple) else (residual,)
    # The shapes on both sides are plain from the lines themselves.
    words = [_word(p) for p in parts if p is not None and p is not False and not (p.__class__ is tuple and p in shapes)]
    return f"{linear.name}({name}{'; ' * bool(words)}{', '.join(words)})"


def _word(part):
    if hasattr(part, "shape"):
        return _type(part)
    if isinstance(part, tuple):
        return f"({','.join(map(_word, part))}{',' * (len(part) == 1)})"
    if isinstance(part, slice):
        return ":".join("" if p is None else str(p) for p in (part.start, part.stop, part.step)).removesuffix(":")
    return str(part)


def _check(values, likes, what, name):
    if len(values) != len(likes):
        raise ValueError(f"the linear program has {len(likes)} {what}, got {len(values)} {name}")
    for value, like in zip(values, likes, strict=True):
        check_cotangent(value, like.shape, like.dtype, name.removesuffix("s"), like.zero)


def _zeros(like):
    return zeros_like(like.zero, like.shape)


def linearize(f, *primals):
    """(f(*primals), program): the derivative of f at the primals as a LinearProgram.

    The function runs once; the program may then be called, and transposed, many times.
    """
    check_function("linearize", f, "f, *primals")
    values, rebuild = flatten(primals)
    values = [_array(v, f"input {i}") for i, v in enumerate(values)]
    with new_level() as level, new_level() as tangent_level:
        leaves = [Input(v) for v in values]
        duals = [Dual(v, LinVar(leaf, tangent_level), level) for v, leaf in zip(values, leaves, strict=True)]
        out = f(*rebuild(duals))
    outs, rebuild_out = _outputs(out)
    live = [y.__class__ is Dual and y.level == level for y in outs]
    nodes = [y.tangent.node if alive and y.tangent.__class__ is LinVar else None
             for y, alive in zip(outs, live, strict=True)]
    ys = [y.primal if alive else y for y, alive in zip(outs, live, strict=True)]
    return rebuild_out(ys), LinearProgram(leaves, nodes, list(map(_shaped, ys)), rebuild, rebuild_out)


def linear_transpose(f, *examples):
    """The transpose of a LINEAR function f of arrays shaped like the examples (their values don't matter):
    a function from cotangents of f's output to a tuple of cotangents like the examples.

    Raises TypeError, naming the op, where f is not linear.
    """
    check_function("linear_transpose", f, "f, *examples")
    return trace_linear(f, *examples).transpose


def trace_linear(f, *examples):
    """A linear function f as a LinearProgram, by running it on unknown tangents shaped like the examples."""
    values, rebuild = flatten(examples)
    with new_level() as level:
        leaves = [Input(v) for v in values]
        out = f(*rebuild([LinVar(leaf, level) for leaf in leaves]))
    outs, rebuild_out = flatten(out)
    nodes = [y.node if y.__class__ is LinVar and y.level == level else None for y in outs]
    for y, node in zip(outs, nodes, strict=True):
        if node is None and xp.any(lower(y)):
            raise TypeError("the function returns a constant that is not 0: that is affine, not linear")
    return LinearProgram(leaves, nodes, list(map(_shaped, outs)), rebuild, rebuild_out)


def _shaped(y):
    """An output with a shape and a dtype: plain numbers become arrays."""
    return y if hasattr(y, "dtype") else xp.asarray(y)
