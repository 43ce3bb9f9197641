"""The op table, a module per kind.

Functions have NumPy's names and semantics (torch's, where NumPy has none); methods of tensors have torch's. Rules:

- Floating dtypes: float32 in, float32 out, and float32 gradients; a gradient has its input's dtype and shape. Mixed
  floating dtypes promote as in NumPy, and each input gets its gradient in its own dtype.
- Python scalars are weak: they take the array's dtype (x * 2.0 of a float32 x is float32).
- Bool and integer arrays get no gradient. Comparisons, logic, argmax and their like, floor, ceil, sign and one_hot give
  constants: nothing flows through them, at any order.
- Shapes broadcast as in NumPy, and each input's gradient is summed back to its own shape.
- Ties in max, min, maximum, minimum, clip and max_pool share the gradient evenly; sort, topk and argmax take the first.
- At kinks: relu'(0) = 0, |x|'(0) = 0; d(x**y)/dy = 0 where x ≤ 0; mod and floor pass over their jumps.
- prod's derivatives are right where elements are 0. where's are 0 in the branch not taken.
- The arrays of an op live on one device, and so does its result; indices and class numbers from the host are moved. On
  a GPU an index out of range raises late (backend.refuse).
- Empty arrays, 0-d arrays, axes of extent 1 and arrays of any strides are ordinary arguments. A reduction that has no
  value for nothing (max, argmax) raises over an empty axis; sum gives 0 and prod 1.
"""

from . import random
from .arrange import (
    expand_dims,
    flatten,
    flip,
    moveaxis,
    pad,
    ravel,
    repeat,
    squeeze,
    stack,
    swapaxes,
    tile,
)
from .attention import scaled_dot_product_attention
from .chosen_blocks import block_attention
from .convolution import conv1d, conv2d, conv_transpose1d, conv_transpose2d
from .device import to_device
from .einsum import einsum, outer, tensordot
from .elementwise import (
    absolute,
    add,
    astype,
    ceil,
    clip,
    cos,
    div,
    equal,
    erf,
    exp,
    expm1,
    floor,
    floor_divide,
    greater,
    greater_equal,
    isfinite,
    isnan,
    less,
    less_equal,
    log,
    log1p,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    mod,
    mul,
    neg,
    not_equal,
    power,
    reciprocal,
    relu,
    rsqrt,
    sigmoid,
    sign,
    sin,
    sqrt,
    square,
    sub,
    tanh,
    where,
)
from .fused import gelu, linear_cross_entropy, linear_gelu, log_softmax, softmax, softmax_cross_entropy, swiglu
from .grouped import grouped_matmul, grouped_outer
from .indexing import (
    argsort,
    embedding,
    getitem,
    one_hot,
    scatter_add,
    sort,
    take,
    take_along_axis,
    topk,
)
from .linalg import dot, linear, matmul
from .normalization import batch_norm, layer_norm, rms_norm
from .pooling import avg_pool1d, avg_pool2d, max_pool1d, max_pool2d
from .random import dropout
from .reduction import (
    all,
    any,
    argmax,
    argmin,
    broadcast_to,
    cumsum,
    logsumexp,
    max,
    mean,
    min,
    prod,
    std,
    sum,
    var,
)
from .shape import chunk, concatenate, reshape, split, transpose

__all__ = [name for name in dir() if not name.startswith("_") and callable(globals()[name])]
