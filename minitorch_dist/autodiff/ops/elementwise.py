"""Elementwise ops. Binary ones broadcast; the tape undoes that in one place (reverse.fit)."""

import math
import operator

from ...backend import (
    as_dtype,
    choose,
    functions,
    in_float32,
    is_floating,
    is_half,
    is_short,
    of_one_dtype,
    result_type,
    to_float32,
    to_half,
    weak,
    xp,
)
from ..dispatch import binary, unary
from ..primitive import TRACED, LinearOp, Primitive, bind, lower, state

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


def _slope(x, y):
    """y·x^(y-1); where both are 0 that is 0, and not 0·∞."""
    if y.__class__ in (float, int):
        return y * power(x, y - 1 if y else 1)
    return y * power(x, where(xp.logical_and(lower(x) == 0, lower(y) == 0), 1, y - 1))


power = binary(
    "power", functions.power, (scale, _slope),
    (scale, lambda ans, x: where(lower(x) > 0, ans * log(where(lower(x) > 0, x, 1.0)), 0.0)),
    "x to the y. The derivative with respect to y is taken as 0 where x ≤ 0.")


# The residual needs nothing, and names x all the same: so linear_transpose knows that mod isn't linear in x.
mod = binary("mod", xp.remainder, (same, lambda x: None), (scale, lambda x, y: -floor(x / y)),
             "x - y·floor(x / y), of y's sign; the jumps are passed over")


def _tie(x, y, wins):
    """1 where x wins, ½ where both are equal, 0 where y wins; of the operands' common dtype."""
    x, y = lower(x), lower(y)
    weight = wins(x, y) + 0.5 * (x == y)
    return weight.astype(result_type(x, y))


maximum = binary("maximum", xp.maximum,
                 (scale, lambda x, y: _tie(x, y, xp.greater)), (scale, lambda x, y: _tie(y, x, xp.greater)),
                 "The larger of x and y; at a tie each gets half of the gradient.")
minimum = binary("minimum", xp.minimum,
                 (scale, lambda x, y: _tie(x, y, xp.less)), (scale, lambda x, y: _tie(y, x, xp.less)),
                 "The smaller of x and y; at a tie each gets half of the gradient.")

# ---------------------------------------------------------------- functions of one argument

def _rounded_once(function):
    """A raw function of several steps, which computes floats of 16 bits in float32."""
    return lambda x: in_float32(function, x) if getattr(x, "itemsize", 0) == 2 and is_half(x) else function(x)


exp = unary("exp", xp.exp, (scale, "ans"), "e to the x")
expm1 = unary("expm1", xp.expm1, (scale, lambda ans: ans + 1), "exp(x) - 1, exact near 0")
log = unary("log", xp.log, (divide, "x"), "The natural logarithm")
log1p = unary("log1p", xp.log1p, (divide, lambda x: x + 1), "log(1 + x), exact near 0")
sqrt = unary("sqrt", xp.sqrt, (divide, lambda ans: 2 * ans), "The square root")
rsqrt = unary("rsqrt", _rounded_once(lambda x: 1 / xp.sqrt(x)), (scale, lambda ans, x: -0.5 * ans / x), "1 / sqrt(x)")
square = unary("square", xp.square, (scale, lambda x: 2 * x), "x²")
sin = unary("sin", xp.sin, (scale, lambda x: cos(x)), "The sine")
cos = unary("cos", xp.cos, (scale, lambda x: -sin(x)), "The cosine")
tanh = unary("tanh", xp.tanh, (damp, lambda ans: ans * ans), "The hyperbolic tangent")
absolute = unary("abs", xp.absolute, (scale, lambda x: sign(x)), "|x|; the derivative at 0 is taken as 0")
sign = unary("sign", xp.sign, None, "-1, 0 or 1")
floor = unary("floor", xp.floor, None, "The largest integer ≤ x")
ceil = unary("ceil", xp.ceil, None, "The smallest integer ≥ x")
isnan = unary("isnan", xp.isnan, None, "Whether x is not a number")
isfinite = unary("isfinite", xp.isfinite, None, "Whether x is neither infinite nor NaN")
sigmoid = unary("sigmoid", _rounded_once(functions.sigmoid), (scale, lambda ans: ans - ans * ans), "1 / (1 + exp(-x))")
# Multiplying by the mask is 15 times faster than selecting by it (np.where branches per element).
relu = unary("relu", functions.relu, (scale, lambda ans: ans > 0),
             "max(x, 0); the derivative at 0 is taken as 0")
erf = unary("erf", functions.erf, (scale, lambda x: 2 / math.sqrt(math.pi) * exp(-(x * x))),
            "The error function 2/√π ∫₀ˣ exp(-t²) dt; relative error below 5e-16 in float64, 2.6e-7 in float32")


def clip(x, a_min=None, a_max=None):
    """x moved into [a_min, a_max] (None: no bound); exactly on a bound x gets half of the gradient. A new array in any
    case."""
    if a_min is None and a_max is None:     # (reduction.py imports this file)
        from .reduction import broadcast_to
        return broadcast_to(x, x.shape)
    x = x if a_min is None else maximum(x, a_min)
    return x if a_max is None else minimum(x, a_max)


def reciprocal(x):
    """1 / x."""
    return div(1.0, x)


# ---------------------------------------------------------------- comparisons and logic: they have no derivative

greater = binary("greater", xp.greater, None, None, "x > y")
greater_equal = binary("greater_equal", xp.greater_equal, None, None, "x ≥ y")
less = binary("less", xp.less, None, None, "x < y")
less_equal = binary("less_equal", xp.less_equal, None, None, "x ≤ y")
equal = binary("equal", xp.equal, None, None, "x = y, elementwise")
not_equal = binary("not_equal", xp.not_equal, None, None, "x ≠ y, elementwise")
logical_and = binary("logical_and", xp.logical_and, None, None, "Whether both are true")
logical_or = binary("logical_or", xp.logical_or, None, None, "Whether one or both are true")
logical_xor = binary("logical_xor", xp.logical_xor, None, None, "Whether exactly one is true")
logical_not = unary("logical_not", xp.logical_not, None, "Whether it is false")
floor_divide = binary("floor_divide", xp.floor_divide, None, None, "floor(x / y)")

# ---------------------------------------------------------------- selection and casts

def _chosen(condition, x, y):
    if 2 in (getattr(x, "itemsize", 0), getattr(y, "itemsize", 0)):
        x, y = of_one_dtype((x, y))
    return choose(condition, x, y)


_where = Primitive("where", _chosen, "condition x y", broadcasts=True,
                   x=(select, "condition"),
                   y=(select, lambda condition: xp.logical_not(lower(condition))))


def _converted(x, old, new):
    if new.itemsize == 2 and is_floating(new):
        return to_half(x, new)
    return to_float32(x) if new == xp.float32 else x.astype(new)


_cast = Primitive("astype", _converted, params="old new", x=(cast, "old new"))


def where(condition, x, y):
    """x where condition, else y; the three broadcast. condition is bool and gets no gradient."""
    mask = lower(condition)
    mask = getattr(mask, "sharded", mask)       # one on a mesh says where the op runs, even if x and y are whole
    out = bind(_where, (xp.bool_(mask) if mask.__class__ is bool else mask, weak(x, y), weak(y, x)))
    return out if out.__class__ in TRACED else constant(out, condition)


def astype(x, dtype):
    """x in another dtype. A cast to an integer or bool dtype ends differentiation."""
    dtype = as_dtype(dtype)
    if x.dtype == dtype:
        return x
    if not is_floating(dtype):
        return constant(lower(x).astype(dtype), x)
    return bind(_cast, (x,), (x.dtype, dtype))


def floats(x):
    """x; in float64 where it has integers or bools, as NumPy's functions take them."""
    return astype(x, xp.float64) if x.dtype.kind in "iub" else x


def wide(x):
    """x; in float32 where it has floats of 16 bits: for squares and sums that may be beyond float16's range."""
    return astype(x, xp.float32) if is_short(x.dtype) else x


def narrow(y, dtype):
    """What was made of wide(x), in x's dtype where that is of 16 bits; as it is under autocast, which rounds where a
    product takes it."""
    return astype(y, dtype) if is_short(dtype) and state.autocast is None else y


def constant(array, like):
    """A raw result of a non-differentiable op: as a tensor where what it was made of was traced."""
    from ..tensor import Tensor
    if hasattr(array, "sharded"):       # of parallel/sharding
        return array.sharded
    return Tensor(array) if like.__class__ in TRACED else array
