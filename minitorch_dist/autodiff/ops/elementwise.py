"""Elementwise ops. Binary ones broadcast; the tape undoes that in one place (reverse.fit)."""

import operator

from ...backend import xp
from ..dispatch import binary, unary
from ..primitive import LinearOp, Primitive, bind, lower

# ---------------------------------------------------------------- linear maps

same = LinearOp("same", lambda t, r: t, lambda c, r: c, fresh=False)
negate = LinearOp("negate", lambda t, r: -t, lambda c, r: -c)
scale = LinearOp("scale", operator.mul, operator.mul)
divide = LinearOp("divide", operator.truediv, operator.truediv)
# Scaling by 1 - r. NumPy takes twice as long for 1 - x as for x - y, and tanh is worth it.
damp = LinearOp("damp", lambda t, r: t - t * r, lambda c, r: c - c * r)
# A mask chooses rather than multiplies, so that an infinite cotangent times a closed gate is 0, not NaN.
select = LinearOp("select", lambda t, mask: where(mask, t, 0.0), lambda c, mask: where(mask, c, 0.0))
cast = LinearOp("cast", lambda t, r: astype(t, r[1]), lambda c, r: astype(c, r[0]))

# ---------------------------------------------------------------- arithmetic

add = binary("add", xp.add, (same, None), (same, None), "x + y")
sub = binary("sub", xp.subtract, (same, None), (negate, None), "x - y")
mul = binary("mul", xp.multiply, (scale, "y"), (scale, "x"), "x · y, elementwise")
div = binary("div", xp.divide, (divide, "y"), (scale, lambda ans, y: -ans / y), "x / y")
neg = unary("neg", xp.negative, (negate, None), "-x")
power = binary(
    "power", xp.power,
    (scale, lambda x, y: y * power(x, y - 1)),
    (scale, lambda ans, x: where(lower(x) > 0, ans * log(where(lower(x) > 0, x, 1.0)), 0.0)),
    "x to the y. The derivative with respect to y is taken as 0 where x ≤ 0.")


def _tie(x, y, wins):
    """1 where x wins, ½ where both are equal, 0 where y wins; of the operands' common dtype."""
    x, y = lower(x), lower(y)
    weight = wins(x, y) + 0.5 * (x == y)
    return weight.astype(xp.result_type(x, y))


maximum = binary("maximum", xp.maximum,
                 (scale, lambda x, y: _tie(x, y, xp.greater)), (scale, lambda x, y: _tie(y, x, xp.greater)),
                 "The larger of x and y; at a tie each gets half of the gradient.")
minimum = binary("minimum", xp.minimum,
                 (scale, lambda x, y: _tie(x, y, xp.less)), (scale, lambda x, y: _tie(y, x, xp.less)),
                 "The smaller of x and y; at a tie each gets half of the gradient.")

# ---------------------------------------------------------------- functions of one argument

exp = unary("exp", xp.exp, (scale, "ans"), "e to the x")
expm1 = unary("expm1", xp.expm1, (scale, lambda ans: ans + 1), "exp(x) - 1, exact near 0")
log = unary("log", xp.log, (divide, "x"), "The natural logarithm")
log1p = unary("log1p", xp.log1p, (divide, lambda x: x + 1), "log(1 + x), exact near 0")
sqrt = unary("sqrt", xp.sqrt, (divide, lambda ans: 2 * ans), "The square root")
sin = unary("sin", xp.sin, (scale, lambda x: cos(x)), "The sine")
cos = unary("cos", xp.cos, (scale, lambda x: -sin(x)), "The cosine")
tanh = unary("tanh", xp.tanh, (damp, lambda ans: ans * ans), "The hyperbolic tangent")
absolute = unary("abs", xp.absolute, (scale, lambda x: sign(x)), "|x|; the derivative at 0 is taken as 0")
sign = unary("sign", xp.sign, None, "-1, 0 or 1")
floor = unary("floor", xp.floor, None, "The largest integer ≤ x")


def _sigmoid(x):
    small = xp.exp(-xp.absolute(x))     # never overflows, and keeps its digits on both sides
    return xp.where(x >= 0, 1, small) / (1 + small)


sigmoid = unary("sigmoid", _sigmoid, (scale, lambda ans: ans - ans * ans), "1 / (1 + exp(-x))")
# Multiplying by the mask is 15 times faster than selecting by it (np.where branches per element).
relu = unary("relu", lambda x: xp.maximum(x, 0), (scale, lambda ans: ans > 0),
             "max(x, 0); the derivative at 0 is taken as 0")

# ---------------------------------------------------------------- comparisons: they have no derivative

greater = binary("greater", xp.greater, None, None, "x > y")
greater_equal = binary("greater_equal", xp.greater_equal, None, None, "x ≥ y")
less = binary("less", xp.less, None, None, "x < y")
less_equal = binary("less_equal", xp.less_equal, None, None, "x ≤ y")
equal = binary("equal", xp.equal, None, None, "x = y, elementwise")
not_equal = binary("not_equal", xp.not_equal, None, None, "x ≠ y, elementwise")

# ---------------------------------------------------------------- selection and casts

_where = Primitive("where", xp.where, "condition x y", broadcasts=True,
                   x=(select, "condition"),
                   y=(select, lambda condition: xp.logical_not(lower(condition))))
_cast = Primitive("astype", lambda x, old, new: x.astype(new), params="old new",
                  x=(cast, "old new"))


def where(condition, x, y):
    """x where condition, else y; the three broadcast. condition is bool and gets no gradient."""
    return bind(_where, (lower(condition), x, y))


def astype(x, dtype):
    """x in another dtype. A cast to an integer or bool dtype ends differentiation."""
    dtype = xp.dtype(dtype)
    if x.dtype == dtype:
        return x
    if dtype.kind != "f":
        x = lower(x)
        return wrap_constant(x.astype(dtype))
    return bind(_cast, (x,), (x.dtype, dtype))


def wrap_constant(array):
    """A raw result of a non-differentiable op on a tensor, as a tensor."""
    from ..tensor import Tensor
    return Tensor(array)
