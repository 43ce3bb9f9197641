"""Derivatives given by hand: custom_vjp, custom_jvp, stop_gradient. The names and signatures are JAX's."""

from ..backend import xp
from .forward import Dual
from .linear import LinVar
from .primitive import TRACED, mode, state
from .reverse import check_cotangent, new_level, ready_made, run
from .tensor import Leaf, Node, Tensor, outputs, wrap
from .tree import flatten


def stop_gradient(x):
    """x (an array, or nested arrays) as a constant: no derivative of any level or mode flows through it."""
    values, rebuild = flatten(x)
    return rebuild([_constant(v) for v in values])


def _constant(x):
    eager = False
    while x.__class__ in TRACED:
        eager, x = x.__class__ is Tensor, x.lowered()
    return Tensor(x) if eager else x


def top_level(values):
    """(the highest level among the values, the class of a value at it); (-1, None) without traced values."""
    best = max((v for v in values if v.__class__ in TRACED), key=lambda v: v.level, default=None)
    return (-1, None) if best is None else (best.level, best.__class__)


def peel(values, level):
    """The values with those of `level` replaced by what lies under them."""
    return [v.lowered() if v.__class__ in TRACED and v.level == level else v for v in values]


class Custom:
    """A function whose derivative is given by hand. Subclasses handle each kind of traced value."""

    def __init__(self, f):
        self.f = f
        self.__name__, self.__doc__ = getattr(f, "__name__", "custom"), f.__doc__

    def __call__(self, *args):
        values, rebuild = flatten(args)
        level, kind = top_level(values)
        if kind is None:
            return self.f(*args)
        if kind is LinVar:
            raise TypeError(f"{self.__name__!r} has a derivative given by hand, so it is not linear")
        if kind is Dual:
            return self.push(values, rebuild, level)
        return self.record(values, rebuild, level)

    def record(self, values, rebuild, level):
        """Run on the level below, and put one node on the tape for all of it."""
        raw = peel(values, level)
        out, extra = self.forward(raw, rebuild)
        outs, rebuild_out = flatten(out)
        parents = [v.node if isinstance(v, Tensor) and v.level == level and state.off < level else None for v in values]
        if all(p is None for p in parents):
            return rebuild_out([wrap(o, None, level) for o in outs])
        call = Call(self, values, rebuild, rebuild_out, outs, extra, level)
        arrays = tuple(r if p is not None else None for r, p in zip(raw, parents, strict=True))
        call.layout = tuple(f"input {i}" for i in range(len(arrays)))
        return rebuild_out(outputs(Node(call, parents, arrays, None, None), outs, level))


class Call:
    """One recorded call of a Custom function; it stands where a Node has its primitive."""

    pulls, multi = None, True

    def __init__(self, custom, values, rebuild, rebuild_out, outs, extra, level):
        self.name, self.custom, self.values, self.rebuild = custom.__name__, custom, values, rebuild
        self.rebuild_out, self.outs, self.extra = rebuild_out, [(o.shape, o.dtype) for o in outs], extra
        self.level, self.depth = level, state.level
        self.fresh = (False,) * len(values)

    def cotangents(self, node, saved, ct):
        if ct is None:
            return ready_made([None] * len(node.parents))
        parts = [xp.zeros(*like) if c is None else c for c, like in zip(ct.parts, self.outs, strict=True)]
        extra = self.extra
        if self.level == 0 and any(c.__class__ in TRACED for c in parts):
            # To be differentiated again: what the derivative is made of must hang on the inputs.
            with mode(off=-1, level=max(state.level, self.depth)):
                _, extra = self.custom.forward(self.values, self.rebuild)
        return ready_made(self.custom.pull(extra, parts, self.rebuild_out, node.parents))


class custom_vjp(Custom):
    """A function with a hand-written reverse rule.

        @custom_vjp
        def f(x): …
        f.defvjp(forward, backward)

    forward(*args) -> (f(*args), residuals); backward(residuals, cotangent) -> a tuple with one cotangent per
    argument, None for arguments that get none. Forward mode raises: give a rule for it with custom_jvp.
    """

    def defvjp(self, forward, backward):
        """Set the rule."""
        self._forward, self._backward = forward, backward
        return self

    def forward(self, values, rebuild):
        return self._forward(*rebuild(values))

    def pull(self, residuals, parts, rebuild_out, parents):
        gs = self._backward(residuals, rebuild_out(parts))
        if not isinstance(gs, tuple):
            raise TypeError(f"the backward of {self.__name__!r} must return a tuple with one cotangent per argument, "
                            f"got {type(gs).__name__}")
        gs = [leaf for g in gs for leaf in ([None] if g is None else flatten(g)[0])]
        if len(gs) != len(parents):
            raise ValueError(f"the backward of {self.__name__!r} returned {len(gs)} cotangents for "
                             f"{len(parents)} arguments")
        for g, p in zip(gs, parents, strict=True):
            if g is not None and p is not None:
                check_cotangent(g, p.shape, p.dtype)
        return gs

    def push(self, values, rebuild, level):
        raise TypeError(f"{self.__name__!r} has a reverse rule only (custom_vjp): it can't be differentiated in "
                        "forward mode; give it a custom_jvp, which serves both")


class custom_jvp(Custom):
    """A function with a hand-written forward rule, which serves reverse mode too: it is run with unknown tangents,
    and the linear program that is left of it is transposed.

        @custom_jvp
        def f(x): …
        f.defjvp(rule)

    rule(primals, tangents) -> (f(*primals), tangent of the output), linear in the tangents; both tuples.
    """

    def defjvp(self, rule):
        """Set the rule."""
        self._rule = rule
        return self

    def push(self, values, rebuild, level):
        dual = [v.__class__ is Dual and v.level == level for v in values]
        primals = peel(values, level)
        tangents = [v.tangent if d else xp.zeros(v.shape, v.dtype) for v, d in zip(values, dual, strict=True)]
        out, tangent = self._rule(rebuild(primals), rebuild(tangents))
        outs, rebuild_out = flatten(out)
        return rebuild_out([Dual(o, t, level) for o, t in zip(outs, flatten(tangent)[0], strict=True)])

    def forward(self, values, rebuild):
        with new_level() as level:
            leaves = [Leaf(v.shape, v.dtype) for v in values]
            out, tangent = self._rule(rebuild(values), rebuild([LinVar(leaf, level) for leaf in leaves]))
        nodes = [t.node if t.__class__ is LinVar else None for t in flatten(tangent)[0]]
        return out, (leaves, nodes)

    def pull(self, program, parts, rebuild_out, parents):
        leaves, nodes = program
        found = {}
        run([(n, ct) for n, ct in zip(nodes, parts, strict=True) if n is not None], retain=True, into=found)
        return [found.get(leaf) for leaf in leaves]


