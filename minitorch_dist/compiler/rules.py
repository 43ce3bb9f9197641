"""What the compiler knows of ops: which are taken apart, and what shapes they give."""

import math

import numpy as np

from ..autodiff import ops
from ..autodiff.ops.attention import allowed, pieces
from ..autodiff.primitive import lower
from ..autodiff.tree import flatten
from ..backend import finfo, module_of, result_type, xp
from .ir import mapped, values_in

# What kernels become -> fused ops that stay whole, for their own kernels know more than their definitions. None: all
# (NumPy's are as good as tiles of single ops).
WHOLE = {"c": {"conv", "max_pool", "avg_pool", "prod", "linear_cross_entropy", "block_attention"}, "numpy": None}
WHOLE["triton"] = WHOLE["c"] | {"attention", "softmax_cross_entropy"}

# Ops that give each element from the elements at the same place, with broadcasting.
ELEMENTWISE = {
    "add", "sub", "mul", "div", "neg", "power", "mod", "floor_divide", "maximum", "minimum", "exp", "expm1", "log",
    "log1p", "sqrt", "rsqrt", "square", "sin", "cos", "tanh", "abs", "sign", "floor", "ceil", "isnan", "isfinite",
    "sigmoid", "relu", "erf", "greater", "greater_equal", "less", "less_equal", "equal", "not_equal", "logical_and",
    "logical_or", "logical_xor", "logical_not", "where", "astype"}

# Ops that give the same elements in another order or shape, without copying where the strides allow it.
VIEWS = {"reshape", "transpose", "broadcast_to"}


def _cross_entropy(logits, labels, ignore):
    """Without an index: comparing all classes with the label costs a kernel nothing, and its derivative adds nothing up
    by index."""
    chosen = module_of(logits).arange(logits.shape[1]) == labels[:, None]
    losses = ops.logsumexp(logits, 1) - ops.sum(ops.where(chosen, logits, 0.0), 1)
    return losses if ignore is None else ops.where(labels != ignore, losses, 0.0)


def _attention(q, k, v, mask, documents, band, scale):
    """With masked scores replaced by 0 before exp, not by something so small that exp gives 0: for such arguments a C
    library's exp for vectors goes one by one."""
    mask = allowed(q, k, mask, documents, band)
    batch, heads, times, size = q.shape
    share = (batch, k.shape[1], heads // k.shape[1])
    k, v = (ops.reshape(x, (batch, x.shape[1], 1, *x.shape[2:])) for x in (k, v))
    scores = ops.matmul(ops.reshape(q, (*share, times, size)), ops.swapaxes(k, -1, -2)) * scale
    scores = ops.reshape(scores, (batch, heads, *scores.shape[3:]))
    if mask is None:
        p = ops.softmax(scores)
    else:
        top = lower(ops.where(mask, scores, float(finfo(scores.dtype).min) / 2)).max(axis=-1, keepdims=True)
        e = ops.where(mask, ops.exp(ops.where(mask, scores - top, 0.0)), 0.0)
        total = ops.sum(e, -1, keepdims=True)
        p = e / ops.where(lower(total) > 0, total, 1.0)         # a row that may see nothing gives 0
    return ops.reshape(ops.matmul(ops.reshape(p, (*share, *p.shape[2:])), v), (batch, heads, times, v.shape[-1]))


def _is_narrow(q, k, v, mask, documents, band, scale):
    """Whether attention's own kernel leaves out most scores, which loops over all of them would make."""
    return mask is None and bool(pieces(q.shape[2], k.shape[2], band))


WHOLE_WHERE = {"attention": _is_narrow}     # fused ops that stay whole for some arguments

# Instead of a fused op's own definition.
DEFINITIONS = {"softmax_cross_entropy": _cross_entropy, "attention": _attention}


def results_of(node, module=np):
    """([(shape, dtype)] of a node's results, function that puts them into the form of the forward's result, or None for
    one array). Where no rule gives them, the op is run, on zeros of a module: numpy or cupy."""
    values = list(values_in(node.args))
    name = node.name
    if name in ELEMENTWISE or isinstance(node.op.forward, np.ufunc) and node.op.forward.signature is None:
        example = run(node, lambda v: np.ones((1,) * len(v.shape), v.dtype))
        return [(np.broadcast_shapes(*(v.shape for v in values)), example.dtype)], None
    if name in ("reshape", "broadcast_to"):
        return [(tuple(node.args[2]), values[0].dtype)], None
    if name == "check":
        return [], None
    if name == "random_rows":
        return [(node.args[0], xp.dtype(xp.float32))], None
    if name == "transpose":
        return [(tuple(values[0].shape[i] for i in node.args[1]), values[0].dtype)], None
    if name == "matmul":
        return [(product_shape(*(v.shape for v in values)), result_type(*(v.dtype for v in values)))], None
    made = run(node, lambda v: module.zeros(v.shape, v.dtype))
    if hasattr(made, "shape"):
        return [(made.shape, made.dtype)], None
    leaves, rebuild = flatten(made, order=list)
    kinds = [(leaf.shape, leaf.dtype) for leaf in leaves if hasattr(leaf, "shape")]

    def put_together(results):
        results = iter(results)
        return rebuild([next(results) if hasattr(leaf, "shape") else leaf for leaf in leaves])
    return kinds, put_together


def product_shape(x, y):
    """The shape of x @ y."""
    if x[-1] != y[-2]:
        raise ValueError(f"matmul: shapes {x} and {y} don't fit: {x[-1]} columns, {y[-2]} rows")
    return (*np.broadcast_shapes(x[:-2], y[:-2]), x[-2], y[-1])


def run(node, array_of):
    """A node's forward on array_of(value) for each Value."""
    args = mapped(node.args, array_of)
    with np.errstate(all="ignore"):
        return node.op.forward(*args)


def results(node, made):
    """What a node's forward gave, as a list of arrays."""
    if not node.flat:
        return [made]
    return [leaf for leaf in flatten(made, order=list)[0] if hasattr(leaf, "shape")]


def count(shape):
    """Number of elements of a shape."""
    return math.prod(shape)
