"""The operators and methods of traced values: one table, set once on their common base."""

from . import ops
from .ops.indexing import At
from .primitive import Traced


def _swapped(op):
    def reflected(x, y):
        return op(y, x)
    return reflected


METHODS = {
    "__add__": ops.add, "__radd__": _swapped(ops.add),
    "__sub__": ops.sub, "__rsub__": _swapped(ops.sub),
    "__mul__": ops.mul, "__rmul__": _swapped(ops.mul),
    "__truediv__": ops.div, "__rtruediv__": _swapped(ops.div),
    "__pow__": ops.power, "__rpow__": _swapped(ops.power),
    "__matmul__": ops.matmul, "__rmatmul__": _swapped(ops.matmul),
    "__neg__": ops.neg, "__abs__": ops.absolute, "__getitem__": ops.getitem,
    "__gt__": ops.greater, "__ge__": ops.greater_equal, "__lt__": ops.less, "__le__": ops.less_equal,
    "__eq__": ops.equal, "__ne__": ops.not_equal, "__hash__": object.__hash__,
    "at": property(At),
    **{name: getattr(ops, name) for name in (
        "argmax", "astype", "broadcast_to", "cos", "dot", "exp", "expm1", "floor", "log", "log1p", "log_softmax",
        "logsumexp", "matmul", "max", "maximum", "mean", "min", "minimum", "relu", "reshape", "sigmoid", "sign", "sin",
        "softmax", "sort", "split", "sqrt", "std", "sum", "tanh", "transpose", "var")},
    "abs": ops.absolute, "pow": ops.power,
}

for _name, _function in METHODS.items():
    setattr(Traced, _name, _function)
