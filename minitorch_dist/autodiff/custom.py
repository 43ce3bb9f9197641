"""Derivatives given by hand: custom_vjp, custom_jvp, stop_gradient. The names and signatures are JAX's."""

from ..backend import is_floating, xp, zeros_like
from ..ledger import keep
from .forward import Dual
from .linear import Input, LinVar
from .primitive import TRACED, lower, mode, state
from .reverse import check_cotangent, new_level, ready_made, run
from .saved import Packed
from .tensor import Leaf, Node, Tensor, check_forward, count_kept, outputs, wrap
from .tree import flatten, refuse_sharded
from .writes import log


def stop_gradient(x):
    """x (an array, or nested arrays) as a constant: no derivative of any level or mode flows through it."""
    values, rebuild = flatten(x)
    return rebuild([_constant(v) for v in values])


def _constant(x):
    eager = False
    while x.__class__ in TRACED:
        eager, x = x.__class__ is Tensor, x.lowered()
    if hasattr(x, "sharded"):       # of parallel/sharding
        return x.opened()
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

    flops = None    # flops(*args) -> floating-point operations of one run, for nn.summary

    def __init__(self, f):
        self.f = f
        self.__name__, self.__doc__ = getattr(f, "__name__", "custom"), f.__doc__

    def __call__(self, *args):
        values, rebuild = flatten(args)
        refuse_sharded(values, f"an argument of {self.__name__!r}, whose derivative is given by hand,")
        level, kind = top_level(values)
        if kind is None:
            return self.f(*args)
        if kind is LinVar:
            raise TypeError(f"{self.__name__!r} has a derivative given by hand, so it is not linear")
        if kind is Dual:
            return self.push(values, rebuild, level)
        return self.record(args, values, rebuild, level)

    def record(self, args, values, rebuild, level):
        """Run on the level below, and put one node on the tape for all of it."""
        out, extra = self.forward(peel(values, level), rebuild)
        outs, rebuild_out = flatten(out)
        outs = [self.closed(o, level) for o in outs]
        parents = [v.node if isinstance(v, Tensor) and v.level == level and state.off < level else None for v in values]
        if all(p is None for p in parents):
            return rebuild_out([wrap(o, None, level) for o in outs])
        kept, rebuild_kept = self.residuals(extra)
        call = Call(self, rebuild, rebuild_kept, rebuild_out, outs, level, len(kept))
        saved = (*kept, *peel(values, level))
        if state.pack is not None:
            saved = Packed(saved, *state.pack)
        node = Node(call, parents, saved, None, None)
        if state.counting:
            for v, p in zip(values, parents, strict=True):
                if isinstance(p, Leaf):
                    keep(lower(v), "parameter")
            count_kept(saved)
        if state.anomaly:
            node.where = check_forward(call, peel(values, level), outs, several=True)
        return rebuild_out(outputs(node, outs, level))

    def closed(self, value, level):
        """An output of the forward rule as a value below `level`. Raises where it follows something that was no
        argument: that derivative would be lost."""
        while value.__class__ in TRACED and value.level >= level:
            if value.__class__ is LinVar or value.__class__ is Dual or value.node is not None:
                raise TypeError(f"{self.__name__!r} reads a value from around it that is being differentiated, and its "
                                "rule knows nothing of that: pass it as an argument")
            value = value.lowered()
        return value if hasattr(value, "dtype") else xp.asarray(value)


class Call:
    """One recorded call of a Custom function; it stands where a Node has its primitive. The node has saved what the
    rule asked to keep, which is watched for writes, then the arguments, for a rule that is to be differentiated."""

    pulls, multi = None, True

    def __init__(self, custom, rebuild, rebuild_kept, rebuild_out, outs, level, watched):
        self.name, self.custom, self.watched = custom.__name__, custom, watched
        self.rebuild, self.rebuild_kept, self.rebuild_out = rebuild, rebuild_kept, rebuild_out
        self.outs = [(o.shape, o.dtype) for o in outs]
        self.level, self.depth, self.layout = level, state.level, ("residual",) * watched
        self.autocast = state.autocast

    def flops(self, saved):
        """Of one run, as the function's `flops` says; 0 where it doesn't."""
        count = self.custom.flops
        return 0 if count is None else count(*self.rebuild(saved[self.watched:]))

    def cotangents(self, node, saved, ct, wanted):
        self.fresh = (False,) * len(node.parents)
        if ct is None:
            return ready_made([None] * len(node.parents))
        kept, values = saved[:self.watched], saved[self.watched:]
        example = lower(next(c for c in ct.parts if c is not None))
        parts = [zeros_like(example, *like) if c is None else c for c, like in zip(ct.parts, self.outs, strict=True)]
        again = self.level == 0 and any(c.__class__ in TRACED for c in parts)
        if again:   # to be differentiated again: what the derivative is made of must hang on the inputs
            check_rerun(node, values)
            with mode(off=-1, level=max(state.level, self.depth), autocast=self.autocast and self.autocast.anew()):
                _, extra = self.custom.forward([v if p is None else Tensor(v, p) for v, p in zip(
                    values, node.parents, strict=True)], self.rebuild)
        else:
            extra = self.rebuild_kept(kept)
        gs = self.custom.pull(extra, parts, self.rebuild_out, self.rebuild(values), node.parents)
        if self.level == 0 and not again:
            gs = [g if g is None else lower(g) for g in gs]
        return ready_made(gs)


def check_rerun(node, values):
    """Raise if an argument was overwritten since the first run."""
    for value in map(lower, values):
        write = log.since(value, node.date) if hasattr(value, "strides") else None
        if write:
            raise RuntimeError(f"the second derivative of {node.primitive.name!r} needs its argument of shape "
                               f"{value.shape}, but {write[1]} has overwritten it since")


def leaves_like(cotangent, argument):
    """The cotangents for an argument's leaves in order. None, for a leaf or for any part of the tree, means none."""
    if cotangent is None:
        return [None] * len(flatten(argument)[0])
    if isinstance(argument, dict):
        return [leaf for k in sorted(argument) for leaf in leaves_like(cotangent[k], argument[k])]
    if isinstance(argument, (tuple, list)):
        return [leaf for c, a in zip(cotangent, argument, strict=True) for leaf in leaves_like(c, a)]
    return [] if argument is None else [cotangent]


class custom_vjp(Custom):
    """A function with a hand-written reverse rule.

        @custom_vjp
        def f(x): …
        f.defvjp(forward, backward)

    forward(*args) -> (f(*args), residuals); backward(residuals, cotangent) -> a tuple with one cotangent per
    argument, None for arguments that get none. All of them are given the arrays under tensors, whose methods are
    NumPy's: x.std() is not a Tensor's; functions, mt.std(x), are the same on both. Forward mode raises: give a rule for
    it with custom_jvp. Residuals and arguments are kept as any op's, by way of saved_tensors_hooks. f.flops, if set to
    a function of the arguments, says how many floating-point operations nn.summary is to count.
    """

    _forward = None

    def defvjp(self, forward, backward):
        """Set the rule."""
        self._forward, self._backward = forward, backward
        return self

    def forward(self, values, rebuild):
        if self._forward is None:
            raise TypeError(f"{self.__name__!r} has no rule yet: call {self.__name__}.defvjp(forward, backward)")
        result = self._forward(*rebuild(values))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"the forward of {self.__name__!r} must return a pair (output, residuals)")
        return result

    def residuals(self, extra):
        return flatten(extra)

    def pull(self, residuals, parts, rebuild_out, args, parents):
        gs = self._backward(residuals, rebuild_out(parts))
        if not isinstance(gs, tuple):
            raise TypeError(f"the backward of {self.__name__!r} must return a tuple with one cotangent per argument, "
                            f"got {type(gs).__name__}")
        if len(gs) != len(args):
            raise ValueError(f"the backward of {self.__name__!r} returned {len(gs)} cotangents for {len(args)} "
                             "arguments")
        try:
            gs = [(i, leaf) for i, (g, a) in enumerate(zip(gs, args, strict=True)) for leaf in leaves_like(g, a)]
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"the backward of {self.__name__!r} returned a cotangent that is nested unlike its "
                             "argument") from error
        for (i, g), p, value in zip(gs, parents, flatten(args)[0], strict=True):
            if g is not None and p is not None:
                check_cotangent(g, p.shape, value.dtype, f"cotangent of argument {i} from the backward of "
                                                         f"{self.__name__!r}", value)
        return [g for _, g in gs]

    def push(self, values, rebuild, level):
        raise TypeError(f"{self.__name__!r} has a reverse rule only (custom_vjp): it can't be differentiated in "
                        "forward mode; give it a custom_jvp, which serves both")


class custom_jvp(Custom):
    """A function with a hand-written forward rule, which serves reverse mode too: it is run with unknown tangents,
    and the linear program that is left of it is transposed.

        @custom_jvp
        def f(x): …
        f.defjvp(rule)

    rule(primals, tangents) -> (f(*primals), tangent of the output), linear in the tangents; both tuples, of arrays as
    custom_vjp's. Arguments that are not being differentiated, integers among them, come with a tangent of zeros.
    """

    _rule = None

    def defjvp(self, rule):
        """Set the rule."""
        self._rule = rule
        return self

    def apply_rule(self, values, tangents, rebuild):
        """(outputs, their tangents), both flat, and the outputs' nesting."""
        if self._rule is None:
            raise TypeError(f"{self.__name__!r} has no rule yet: call {self.__name__}.defjvp(rule)")
        result = self._rule(rebuild(values), rebuild(tangents))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"the rule of {self.__name__!r} must return a pair (output, tangent)")
        (outs, rebuild_out), (ts, _) = map(flatten, result)
        if len(outs) != len(ts):
            raise ValueError(f"the rule of {self.__name__!r} returned {len(outs)} outputs and {len(ts)} tangents")
        for o, t in zip(outs, ts, strict=True):
            check_cotangent(t, o.shape, o.dtype, f"tangent from the rule of {self.__name__!r}")
        return outs, ts, rebuild_out

    def push(self, values, rebuild, level):
        dual = [v.__class__ is Dual and v.level == level for v in values]
        tangents = [v.tangent if d else _no_tangent(v) for v, d in zip(values, dual, strict=True)]
        outs, ts, rebuild_out = self.apply_rule(peel(values, level), tangents, rebuild)
        return rebuild_out([Dual(o, t, level) for o, t in zip(outs, ts, strict=True)])

    def forward(self, values, rebuild):
        with new_level() as level:
            floating = [hasattr(v, "dtype") and is_floating(v.dtype) for v in values]
            leaves = [Input(v) if d else None for v, d in zip(values, floating, strict=True)]
            tangents = [_no_tangent(v) if leaf is None else LinVar(leaf, level)
                        for v, leaf in zip(values, leaves, strict=True)]
            outs, ts, rebuild_out = self.apply_rule(values, tangents, rebuild)
        for t in ts:
            if t.__class__ is not LinVar and xp.any(lower(t)):
                raise TypeError(f"the rule of {self.__name__!r} returned a tangent that doesn't depend on the tangents "
                                "it was given: it must be linear in them")
        return rebuild_out(outs), (leaves, [t.node if t.__class__ is LinVar else None for t in ts])

    def residuals(self, extra):
        program, stack = {}, [n for n in extra[1] if n is not None]
        while stack:
            node = stack.pop()
            if node not in program and node.primitive is not None:
                program[node] = True
                stack.extend(node.parents)
        kept, rebuild = flatten([node.saved for node in program])
        for node in program:
            node.empty()

        def filled(kept):
            for node, saved in zip(program, rebuild(kept), strict=True):
                node.saved = saved
            return extra
        return kept, filled

    def pull(self, extra, parts, rebuild_out, args, parents):
        leaves, nodes = extra
        found = {}
        run([(n, ct) for n, ct in zip(nodes, parts, strict=True) if n is not None], into=found)
        return [None if leaf is None else found.get(leaf) for leaf in leaves]


def _no_tangent(value):
    """The tangent of a constant."""
    value = lower(value)
    return zeros_like(value if hasattr(value, "dtype") else xp.asarray(value))
