"""The fast paths: elementwise ops of one and of two inputs, and ops of one input with parameters, on eager tensors.

`record` in tensor.py can do all that these do; it costs twice as much per op.
Each op gets a function made once, with its table entry unpacked into locals.
Anything but eager tensors and plain numbers goes the general way, by `bind`.
"""

from ..backend import check_devices, to_device_of, weak, xp
from .primitive import GENERAL, TRACED, Primitive, bind, lower, state
from .tensor import Node, Tensor

# Operands that a binary op takes as they are. Python scalars stay Python scalars: they are weak (NEP 50).
PLAIN = frozenset((float, int, bool, xp.ndarray, *(xp.dtype(c).type for c in "?bBhHiIlLqQefd")))

# A `try` costs nothing where nothing is raised: so arrays of several devices are looked for when an op has failed.


def unary(name, forward, rule, doc):
    """Enter an elementwise op of one input into the table; returns the function that users call."""
    primitive = Primitive(name, forward, x=rule)
    needs, = primitive.needs
    keeps_ans, keeps_x = 0 in needs, 1 in needs

    def op(x):
        special = state.special
        if x.__class__ is not Tensor or special is GENERAL:
            return (forward(x) if x.__class__ is xp.ndarray and special is not GENERAL
                    else bind(primitive, (operand(name, x, x),)))
        a, parent = x.data, x.node
        try:
            out = forward(a)
        except Exception as error:
            check_devices(name, (a,), error)
            raise
        if parent is None or rule is None or special:
            return Tensor(out)
        saved = (out if keeps_ans else None, a if keeps_x else None)
        return Tensor(out, Node(primitive, (parent,), saved, out.shape, out.dtype))

    op.__name__ = op.__qualname__ = name
    op.__doc__ = doc
    return op


def binary(name, forward, x_rule, y_rule, doc):
    """Enter a broadcasting elementwise op of two inputs; returns the function that users call."""
    if (x_rule is None) != (y_rule is None):
        raise TypeError(f"{name}: a binary op has a derivative for both of its inputs or for neither")
    primitive = Primitive(name, forward, "x y", broadcasts=True, **({"x": x_rule, "y": y_rule} if x_rule else {}))
    for_x, for_y = primitive.needs
    for_both = for_x | for_y
    x_ans, x_x, x_y = (i in for_x for i in range(3))
    y_ans, y_x, y_y = (i in for_y for i in range(3))
    b_ans, b_x, b_y = (i in for_both for i in range(3))
    constant = x_rule is None and y_rule is None

    def op(x, y):
        special = state.special
        if special is GENERAL:
            return bind(primitive, (operand(name, x, y), operand(name, y, x)))
        if x.__class__ is Tensor:
            a, p = x.data, x.node
            if y.__class__ is Tensor:
                b, q = y.data, y.node
            elif y.__class__ in PLAIN:
                b, q = weak(y, a) if a.itemsize == 2 else y, None
            else:
                return bind(primitive, (x, operand(name, y, x)))
        elif y.__class__ is Tensor and x.__class__ in PLAIN:
            b, q = y.data, y.node
            a, p = weak(x, b) if b.itemsize == 2 else x, None
        else:
            return bind(primitive, (operand(name, x, y), operand(name, y, x)))
        try:
            out = forward(a, b)
        except Exception as error:
            check_devices(name, (a, b), error)
            raise
        if (p is None and q is None) or constant or special:
            return Tensor(out)
        if q is None:
            saved = (out if x_ans else None, a if x_x else None, b if x_y else None)
        elif p is None:
            saved = (out if y_ans else None, a if y_x else None, b if y_y else None)
        else:
            saved = (out if b_ans else None, a if b_x else None, b if b_y else None)
        return Tensor(out, Node(primitive, (p, q), saved, out.shape, out.dtype))

    op.__name__ = op.__qualname__ = name
    op.__doc__ = doc
    return op


def with_params(primitive):
    """bind(primitive, (x,), params) as a function of (x, params), quicker where x is an eager tensor: for ops of one
    input and no side result that every program is full of (sum, reshape, …)."""
    needs, = primitive.needs
    keeps_ans, keeps_x = 0 in needs, 1 in needs
    forward = primitive.forward

    def op(x, params):
        special = state.special
        if x.__class__ is not Tensor or special is GENERAL:
            return (forward(x, *params) if x.__class__ is xp.ndarray and special is not GENERAL
                    else bind(primitive, (x,), params))
        a, parent = x.data, x.node
        try:
            out = forward(a, *params)
        except Exception as error:
            check_devices(primitive.name, (a,), error)
            raise
        if parent is None or special:
            return Tensor(out)
        saved = (out if keeps_ans else None, a if keeps_x else None, *params)
        return Tensor(out, Node(primitive, (parent,), saved, out.shape, out.dtype))
    return op


def as_array(name, value, other=None, argument="x"):
    """An op's argument that has no shape, a list or a number, as an array beside `other`."""
    return xp.asarray(operand(name, value, value if other is None else other, argument))


def operand(name, value, other, argument=None):
    """What an op takes as an array: traced and plain values as they are, sequences as arrays where the other operand
    is. TypeError for all else, which names the argument, where it is given."""
    if value.__class__ in (float, int):
        return weak(value, other)
    if value.__class__ in TRACED or value.__class__ in PLAIN or hasattr(value, "__array_ufunc__") \
            or isinstance(value, xp.generic):       # bfloat16's, which has none
        return value
    kind, hint = type(value).__name__, "give a Tensor, an array or a number"
    if isinstance(value, (list, tuple)):
        if any(v.__class__ in TRACED for v in value):
            kind, hint = f"{kind} of Tensors", "make one of them by mt.stack or mt.concatenate"
        elif (array := xp.asarray(value)).dtype.kind in "OSU":
            kind = f"{kind} of {array.dtype.type.__name__}"
        else:
            return to_device_of(array, lower(other))
    raise TypeError(f"{name}: can't take a {kind}{f' for {argument}' if argument else ''}; {hint}") from None
