"""The operators and methods of traced values: one table, set once on their common base.

Functions are NumPy's; methods are torch's where the two differ. `dim` and
`keepdim` may also be called `axis` and `keepdims`. On purpose otherwise than in
torch: x.max(dim), x.min(dim) and x.sort(dim) give the values alone (the places
are x.argmax(dim), x.argmin(dim), x.argsort(dim)); x.size and x.T are NumPy's;
x += y makes a new x, but for a parameter: under no_grad it is written, else it is refused.
"""

import math

from ..backend import names_device, xp
from ..torch_names import NAMES, tell
from . import ops
from .modes import is_grad_enabled
from .ops.indexing import At
from .ops.shape import one_axis, split_by_size
from .primitive import Traced

NUMPY_NAMES = {"dim": "axis", "dims": "axis", "keepdim": "keepdims"}
DTYPE_NAMES = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64", "int": "int32",
               "long": "int64", "bool": "bool"}


def _swapped(op):
    def reflected(x, y):
        return op(y, x)
    return reflected


def _parameter_in_place(op):
    """p -= lr · p.grad under no_grad writes into a leaf, as in torch; outside of it RuntimeError, as the name would be
    bound to another tensor, and the parameter stay as it was. All else is rebound, values of transforms too, as their
    memory is the caller's: NotImplemented is Python's word for x = x + y."""
    def method(x, y):
        if x.level or getattr(x, "leaf", None) is None:
            return NotImplemented
        if is_grad_enabled():
            if not x.requires_grad:
                return NotImplemented
            raise RuntimeError(f"{op.__name__} in place, of a leaf that requires grad: to write into it, do it under "
                               "no_grad(); for a new tensor write x = x + y")
        made = op(x, y)
        if made.shape != x.shape:       # which may broadcast to x's
            raise ValueError(f"{op.__name__} in place: the result of shape {made.shape} isn't of x's, {x.shape}")
        x[...] = made
        return x
    return method


def _with_dims(function):
    """The function as a method that knows torch's names of its arguments, too."""
    def method(x, *args, **named):
        if named:
            if "out" in named or "dtype" in named:      # as np.sum(x) has them
                raise TypeError(f"{function.__name__}: out= and dtype= are NumPy's: call mt.{function.__name__}(x) or "
                                f"x.{function.__name__}(), whose derivatives are known, in place of NumPy's function; "
                                "for another dtype x.to(dtype)")
            named = {NUMPY_NAMES.get(name, name): value for name, value in named.items()}
        return function(x, *args, **named)
    method.__name__, method.__doc__ = function.__name__, function.__doc__
    return method


def _several(x):
    """f(1, 2) and f((1, 2)) mean the same."""
    return tuple(x[0]) if len(x) == 1 and isinstance(x[0], (tuple, list)) else x


def transpose(x, *axes):
    """Two ints: these axes exchanged, as in torch. None, or a tuple of all: their new order, as in NumPy."""
    return ops.swapaxes(x, *axes) if len(axes) == 2 else ops.transpose(x, *axes)


def permute(x, *dims):
    """x with its axes in the order `dims`."""
    return ops.transpose(x, _several(dims))


def expand(x, *sizes):
    """x copied along new and size-1 axes; -1 leaves an old axis as it is."""
    sizes = _several(sizes)
    if len(sizes) < len(x.shape):
        raise ValueError(f"expand: sizes {sizes} for shape {x.shape}: there must be one for each of its axes, or more")
    if -1 in sizes[:len(sizes) - len(x.shape)]:
        raise ValueError(f"expand: sizes {sizes} for shape {x.shape}: -1 stands for the size of an axis that is there")
    old = (1,) * (len(sizes) - len(x.shape)) + x.shape
    return ops.broadcast_to(x, tuple(o if s == -1 else s for s, o in zip(sizes, old, strict=True)))


def repeat(x, *repeats):
    """torch's repeat, NumPy's tile: x as a whole, repeats[i] times along axis i."""
    return ops.tile(x, _several(repeats))


def var(x, axis=None, correction=1, keepdims=False, unbiased=None):
    """As the function var, but divided by count - 1 unless told otherwise: torch's default."""
    axis, correction = _corrected(axis, correction, unbiased)
    return ops.var(x, axis, keepdims, correction)


def std(x, axis=None, correction=1, keepdims=False, unbiased=None):
    """As the function std, but with torch's default correction of 1."""
    axis, correction = _corrected(axis, correction, unbiased)
    return ops.std(x, axis, keepdims, correction)


def _corrected(axis, correction, unbiased):
    """x.var(unbiased=False) and x.var(False) are torch's older words for x.var(correction=0)."""
    if isinstance(axis, bool):
        axis, unbiased = None, axis
    return axis, correction if unbiased is None else int(unbiased)


def gather(x, dim, index):
    """out[i, j, …] = x[index[i, j, …], j, …] for dim 0, and so on; elsewhere index may be shorter than x."""
    dim = one_axis("gather", dim, x.shape)
    cut = tuple(slice(None) if i == dim else slice(0, n) for i, n in enumerate(index.shape))
    return ops.take_along_axis(x[cut], index, dim)


def masked_fill(x, mask, value):
    """x with `value` where mask is True."""
    return ops.where(mask, value, x)


def to(x, *targets, device=None, dtype=None):
    """x on a device, named by a string, and in a dtype. Itself, where that is so already."""
    for target in (*targets, device, dtype):
        if target is not None:
            x = ops.to_device(x, target) if names_device(target) else ops.astype(x, target)
    return x


def logical(op):
    """&, | and ^ on bools; on integers they would be bitwise, which there is no op for."""
    def method(x, y):
        kinds = [v.dtype.kind if hasattr(v, "dtype") else xp.asarray(v).dtype.kind for v in (x, y)]
        if kinds != ["b", "b"]:
            raise TypeError(f"{op.__name__}: &, | and ^ take bools, got dtypes of kinds {kinds}")
        return op(x, y)
    return method


METHODS = {
    "__add__": ops.add, "__radd__": _swapped(ops.add),
    "__sub__": ops.sub, "__rsub__": _swapped(ops.sub),
    "__mul__": ops.mul, "__rmul__": _swapped(ops.mul),
    "__truediv__": ops.div, "__rtruediv__": _swapped(ops.div),
    "__pow__": ops.power, "__rpow__": _swapped(ops.power),
    "__matmul__": ops.matmul, "__rmatmul__": _swapped(ops.matmul),
    "__iadd__": _parameter_in_place(ops.add), "__isub__": _parameter_in_place(ops.sub),
    "__imul__": _parameter_in_place(ops.mul), "__itruediv__": _parameter_in_place(ops.div),
    "__ipow__": _parameter_in_place(ops.power), "__imod__": _parameter_in_place(ops.mod),
    "__ifloordiv__": _parameter_in_place(ops.floor_divide), "__imatmul__": _parameter_in_place(ops.matmul),
    "__pos__": lambda x: x, "__neg__": ops.neg, "__abs__": ops.absolute, "__getitem__": ops.getitem,
    "__gt__": ops.greater, "__ge__": ops.greater_equal, "__lt__": ops.less, "__le__": ops.less_equal,
    "__eq__": ops.equal, "__ne__": ops.not_equal, "__hash__": object.__hash__,
    "__mod__": ops.mod, "__rmod__": _swapped(ops.mod),
    "__floordiv__": ops.floor_divide, "__rfloordiv__": _swapped(ops.floor_divide),
    "__and__": logical(ops.logical_and), "__or__": logical(ops.logical_or), "__xor__": logical(ops.logical_xor),
    "__rand__": _swapped(logical(ops.logical_and)), "__ror__": _swapped(logical(ops.logical_or)),
    "__rxor__": _swapped(logical(ops.logical_xor)),
    "__invert__": ops.logical_not, "at": property(At),
    **{name: getattr(ops, name) for name in (
        "add", "astype", "broadcast_to", "ceil", "chunk", "clip", "cos", "div", "dot", "erf", "exp", "expm1", "flatten",
        "floor", "isfinite", "isnan", "log", "log1p", "logical_and", "logical_not", "logical_or", "logical_xor",
        "matmul", "maximum", "minimum", "moveaxis", "mul", "neg", "ravel", "reciprocal", "relu", "reshape", "rsqrt",
        "sigmoid", "sign", "sin", "sqrt", "square", "sub", "swapaxes", "take", "tanh", "tile", "topk")},
    **{name: _with_dims(getattr(ops, name)) for name in (
        "all", "any", "argmax", "argmin", "argsort", "cumsum", "flip", "log_softmax", "logsumexp", "max", "mean", "min",
        "prod", "softmax", "sort", "squeeze", "sum")},
    **{f.__name__: f for f in (expand, gather, masked_fill, permute, repeat, to, transpose)},
    "var": _with_dims(var), "std": _with_dims(std), "split": split_by_size, "abs": ops.absolute, "pow": ops.power,
    "amax": _with_dims(ops.max), "amin": _with_dims(ops.min),
    "clamp": lambda x, min=None, max=None: ops.clip(x, min, max),
    "view": ops.reshape, "unsqueeze": lambda x, dim: ops.expand_dims(x, dim), "remainder": ops.mod,
    "repeat_interleave": lambda x, repeats, dim=None: ops.repeat(x, repeats, dim),
    "index_select": lambda x, dim, index: ops.take(x, index, dim),
    "cpu": lambda x: ops.to_device(x, "cpu"), "cuda": lambda x, device="cuda": ops.to_device(x, device),
    **{name: lambda x, dtype=dtype: ops.astype(x, dtype) for name, dtype in DTYPE_NAMES.items()},
    "numel": lambda x: math.prod(x.shape), "dim": lambda x: len(x.shape),
    "eq": ops.equal, "ne": ops.not_equal, "gt": ops.greater, "ge": ops.greater_equal, "lt": ops.less,
    "le": ops.less_equal, "mm": ops.matmul, "bmm": ops.matmul,
}

for _name, _function in METHODS.items():
    setattr(Traced, _name, _function)
tell(Traced, NAMES["Tensor"])
