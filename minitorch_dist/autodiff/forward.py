"""Forward mode: dual numbers.

A Dual is a value together with its derivative along one direction:
(x, ẋ). An op on duals applies itself to the values and the rule's LinearOp to
the tangents; the derivative falls out at the end, with no tape and no memory
of the past.

    f(x, ẋ) = (f(x), f'(x)·ẋ)
"""

from .ops.elementwise import astype
from .ops.reduction import broadcast_to
from .primitive import Traced, aux_of, bind, lower, state
from .tensor import Tensor, check_forward, count_kept


class Dual(Traced):
    """A primal and its tangent, of the same shape and dtype; either may be a value of a lower level."""

    __slots__ = ("primal", "tangent", "level")

    def __init__(self, primal, tangent, level):
        self.primal, self.tangent, self.level = primal, tangent, level

    shape = property(lambda self: self.primal.shape)
    dtype = property(lambda self: self.primal.dtype)

    def lowered(self):
        return self.primal

    def detach(self):
        """The array without its tangent, off all levels."""
        return Tensor(lower(self.primal))

    def __repr__(self):
        return f"Dual({self.primal!r}, {self.tangent!r}, level={self.level})"

    @staticmethod
    def process(primitive, args, params, level):
        return push(primitive, args, params, level)


def push(primitive, args, params, level):
    """Apply a primitive to duals of `level`: the op to the primals, its derivative to the tangents."""
    if primitive.definition:
        return primitive.definition(*args, *params)
    if primitive.pullback:
        raise RuntimeError(f"{primitive.name!r} has a pullback only and no definition in ordinary ops: "
                           "it can't be differentiated in forward mode")
    here = [a.__class__ is Dual and a.level == level for a in args]
    primals = [a.primal if dual else a for a, dual in zip(args, here, strict=True)]
    out = bind(primitive, primals, params)
    saved = (out, *primals, *params) + ((aux_of(primitive, primals, params),) if primitive.aux else ())

    tangent = None
    for a, dual, rule in zip(args, here, primitive.rules, strict=True):
        if dual and rule is not None:
            term = rule.linear.apply(a.tangent, rule.residual(saved))
            if primitive.multi:
                tangent = term if tangent is None else tuple(t + s for t, s in zip(tangent, term, strict=True))
                continue
            if primitive.broadcasts and term.shape != out.shape:
                term = broadcast_to(term, out.shape)
            if term.dtype != out.dtype:
                term = astype(term, out.dtype)
            tangent = term if tangent is None else tangent + term
    if state.anomaly:
        check_forward(primitive, [*primals, *(a.tangent for a, dual in zip(args, here, strict=True) if dual)],
                      (out, tangent) if not primitive.multi else (*out, *(tangent or ())), several=True)
    if tangent is None:
        return out          # piecewise constant: it belongs to the level below
    if state.counting:      # nothing is saved in forward mode: what there is, is the dual numbers alive just now
        count_kept((out, tangent))
    if primitive.multi:
        return tuple(Dual(o, t, level) for o, t in zip(out, tangent, strict=True))
    return Dual(out, tangent, level)
