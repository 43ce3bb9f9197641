"""einsum, tensordot, outer: products summed over named axes.

einsum is linear in each operand, and its transpose is einsum again, with the
cotangent in the operand's place:

    c = einsum("ij,jk->ik", a, b)        ā = einsum("ik,jk->ij", c̄, b)

That holds where each name occurs once per operand, and each name of an operand
in another operand or in the output. `einsum` brings any call into that form
first, by ops that have transposes of their own: a repeated name is a diagonal
(getitem), a name that only one operand knows is summed there (sum), and an
extent of 1 that broadcasts is dropped (reshape).
"""

import math
import string
from itertools import combinations

from ... import backend
from ...backend import (
    DEVICE_ARRAYS,
    check_devices,
    in_float32,
    is_floating,
    is_half,
    is_whole,
    module_of,
    recording,
    result_type,
    whole,
    wholes,
    xp,
)
from ..primitive import TRACED, LinearOp, Variadic, bind, lower
from .elementwise import astype
from .indexing import getitem
from .linalg import matmul
from .reduction import sum
from .shape import as_arrays, one_axis, reshape, transpose

# Below this many multiplications NumPy's own loop is faster than planning for BLAS.
SMALL = 10_000


def _forward(xs, subscripts, work):
    if DEVICE_ARRAYS:       # CuPy's einsum would copy arrays of the host up
        check_devices("einsum", xs)
    if any(x.itemsize == 2 and is_half(x) for x in xs):
        return in_float32(_forward, xs, subscripts, work)
    if recording.graph is not None and xs[0].__class__ in DEVICE_ARRAYS:
        return _two_by_two(subscripts, xs)
    return xp.einsum(subscripts, *xs, optimize=work > SMALL and len(xs) > 1)


def _two_by_two(subscripts, xs):
    """The same for a CUDA graph, as products of two operands each: CuPy's einsum can't be recorded.

    Of several pairs that one comes first whose product takes the least memory beyond its operands', as in the greedy
    order of NumPy's einsum_path.
    """
    names, output = subscripts.split("->")
    terms = list(zip(names.split(","), xs, strict=True))
    extents = {name: extent for own, x in terms for name, extent in zip(own, x.shape, strict=True)}

    def kept(pair):
        """The names of a pair that its product has, because others or the output know them."""
        wanted = output + "".join(own for k, (own, _) in enumerate(terms) if k not in pair)
        return [name for name in dict.fromkeys(terms[pair[0]][0] + terms[pair[1]][0]) if name in wanted]

    def growth(pair):
        sizes = [math.prod(extents[name] for name in own) for own in (kept(pair), *(terms[k][0] for k in pair))]
        return sizes[0] - sizes[1] - sizes[2]
    while len(terms) > 1:
        pair = min(combinations(range(len(terms)), 2), key=growth)
        wanted, (right, left) = kept(pair), (terms.pop(k) for k in reversed(pair))
        terms.append(_product(*left, *right, wanted))
    own, x = terms[0]
    return x.transpose([own.index(name) for name in output])


def _product(a, x, b, y, wanted):
    """(names, array): the product of x, whose axes have the names a, and y, summed over what isn't wanted."""
    stack = [name for name in a if name in b and name in wanted]
    inner = [name for name in a if name in b and name not in wanted]
    rows, columns = [name for name in a if name not in b], [name for name in b if name not in a]
    extents = dict(zip(a, x.shape, strict=True)) | dict(zip(b, y.shape, strict=True))
    x, y = _matrices(a, x, stack, rows, inner), _matrices(b, y, stack, inner, columns)
    out = backend.matmul(x, y) if inner else x * y
    names = "".join((*stack, *rows, *columns))
    return names, out.reshape([extents[name] for name in names])


def _matrices(own, x, stack, rows, columns):
    """x, whose axes have the names `own`, as (*stack, the product of all rows, that of all columns)."""
    x = x.transpose([own.index(name) for name in (*stack, *rows, *columns)])
    first, second = len(stack), len(stack) + len(rows)
    return x.reshape(*x.shape[:first], math.prod(x.shape[first:second]), math.prod(x.shape[second:]))


def _apply(t, r):
    i, others, subscripts, work = r
    return _bind([*others[:i], t, *others[i:]], subscripts, work)


def _transpose(c, r):
    i, others, subscripts, work = r
    names, output = subscripts.split("->")
    names = names.split(",")
    wanted, names[i] = names[i], output
    out = _bind([*others[:i], c, *others[i:]], f"{','.join(names)}->{wanted}", work)
    return out if others or out.__class__ in TRACED else out.copy()     # of one operand a view of c, whose it isn't


contracted = LinearOp("einsum", _apply, _transpose)


def _rule(i, n):
    others = " ".join(f"x{k}" for k in range(n) if k != i)
    return contracted, (f"{others} subscripts work", lambda *values: (i, list(values[:-2]), *values[-2:]))


_einsum = Variadic("einsum", _forward, "subscripts work", _rule)


def _bind(xs, subscripts, work):
    return bind(_einsum.of(len(xs)), xs, (subscripts, work))


def einsum(subscripts, *operands):
    """Σ of products over named axes: einsum("bij,bjk->bik", x, y), as np.einsum.

    Without "->" the output has the names that occur once, in alphabetical order. "..." stands for any further axes,
    which broadcast; "ii->i" is a diagonal, "ii" its sum. Raises ValueError where names, axes or extents don't fit.
    """
    operands = as_arrays("einsum", operands)
    common = None
    if not all(is_floating(x.dtype) for x in operands):     # of which sums are wider, and 16 bits' products narrower
        common = result_type(*(x.dtype for x in operands))
        operands = [astype(x, common) for x in operands]
    names, output = _parse(subscripts, [x.shape for x in operands])
    extents = _extents(subscripts, names, operands)
    for name in output:
        if name not in extents or output.count(name) > 1:
            raise ValueError(f"einsum {subscripts!r}: the output's {name!r} must occur in an operand, and once only "
                             "in the output")
    xs = []
    for x, own in zip(operands, names, strict=True):
        x, own = _diagonals(x, own)
        x, own = _without_ones(x, own, extents)
        xs.append((x, own))
    for i, (x, own) in enumerate(xs):
        rest = "".join(other for k, (_, other) in enumerate(xs) if k != i) + output
        if private := tuple(axis for axis, name in enumerate(own) if name not in rest):
            xs[i] = sum(x, private), "".join(n for n in own if n in rest)
    xs, names = zip(*xs, strict=True)
    out = _bind(xs, f"{','.join(names)}->{output}", math.prod(extents.values()))
    return out if common is None else astype(out, common)


def _parse(subscripts, shapes):
    """(names per operand, output names) without ellipsis or blanks."""
    if not isinstance(subscripts, str):
        raise TypeError(f"einsum: subscripts come first, as text like 'ij,jk->ik', got a {type(subscripts).__name__}")
    text = subscripts.replace(" ", "")
    inputs, arrow, output = text.partition("->")
    parts = inputs.split(",")
    if len(parts) != len(shapes):
        raise ValueError(f"einsum {subscripts!r}: subscripts for {len(parts)} operands, got {len(shapes)}")
    if wrong := set(text.replace("...", "").replace("->", "").replace(",", "")) - set(string.ascii_letters):
        raise ValueError(f"einsum {subscripts!r}: {sorted(wrong)} are no names of axes; use letters")
    free = [letter for letter in string.ascii_letters if letter not in text]
    hidden = [len(shape) - len(part.replace("...", "")) for part, shape in zip(parts, shapes, strict=True)]
    for part, shape, more in zip(parts, shapes, hidden, strict=True):
        if more < 0 or (more and "..." not in part):
            raise ValueError(f"einsum {subscripts!r}: {part!r} doesn't name the axes of shape {shape}")
    width = max((h for h, part in zip(hidden, parts, strict=True) if "..." in part), default=0)
    wide = "".join(free[:width])        # the names of the ellipsis' axes; they align on the right
    names = [part.replace("...", wide[width - more:]) for part, more in zip(parts, hidden, strict=True)]
    if not arrow:
        seen = inputs.replace("...", "").replace(",", "")
        output = "..." + "".join(sorted(n for n in set(seen) if seen.count(n) == 1))
    elif wide and "..." not in output:
        raise ValueError(f"einsum {subscripts!r}: the ellipsis' axes must appear in the output; add '...' to it")
    return names, output.replace("...", wide)


def _extents(subscripts, names, operands):
    """{name: extent}; extents of 1 broadcast."""
    extents = {}
    for x, own in zip(operands, names, strict=True):
        for name, extent in zip(own, x.shape, strict=True):
            known = extents.get(name, 1)
            if 1 not in (known, extent) and known != extent:
                raise ValueError(f"einsum {subscripts!r}: {name!r} is {known} in one place and {extent} in another, "
                                 f"shapes {[o.shape for o in operands]}")
            extents[name] = extent if known == 1 else known
    return extents


def _diagonals(x, own):
    """Each repeated name's axes made one, by their diagonal."""
    for name in dict.fromkeys(own):
        if own.count(name) > 1:
            axes = [i for i, n in enumerate(own) if n == name]
            rest = [i for i in range(len(own)) if i not in axes]
            if len({x.shape[i] for i in axes}) > 1:
                raise ValueError(f"einsum: the axes of {name!r} in {own!r} have different extents, shape {x.shape}")
            steps = module_of(lower(x)).arange(x.shape[axes[0]])
            x = getitem(transpose(x, (*axes, *rest)), (steps,) * len(axes))
            own = name + "".join(own[i] for i in rest)
    return x, own


def _without_ones(x, own, extents):
    """x without the axes of extent 1 that broadcast against a larger extent."""
    kept = [i for i, name in enumerate(own) if x.shape[i] == extents[name]]
    if len(kept) == len(own):
        return x, own
    return reshape(x, tuple(x.shape[i] for i in kept)), "".join(own[i] for i in kept)


def tensordot(x, y, axes=2):
    """Σ of products over x's last `axes` axes and y's first, or over axes=(x's, y's), as np.tensordot."""
    n, m = len(x.shape), len(y.shape)
    if is_whole(axes):
        axes = whole("axes", axes)
        left, right = tuple(range(n - axes, n)), tuple(range(axes))
    else:
        left, right = (wholes("axes", a) for a in axes)
    left, right = ([one_axis("tensordot", a, z.shape) for a in group] for z, group in ((x, left), (y, right)))
    if [x.shape[a] for a in left] != [y.shape[a] for a in right]:
        raise ValueError(f"tensordot: axes {axes} of shapes {x.shape} and {y.shape} have different extents")
    free_x, free_y = [a for a in range(n) if a not in left], [a for a in range(m) if a not in right]
    rows, inner = [math.prod(x.shape[a] for a in group) for group in (free_x, left)]
    columns = math.prod(y.shape[a] for a in free_y)
    x = reshape(transpose(x, (*free_x, *left)) if n else x, (rows, inner)), [x.shape[a] for a in free_x]
    y = reshape(transpose(y, (*right, *free_y)) if m else y, (inner, columns)), [y.shape[a] for a in free_y]
    return reshape(matmul(x[0], y[0]), (*x[1], *y[1]))


def outer(x, y):
    """x_i·y_j of the flattened x and y."""
    return reshape(x, (math.prod(x.shape), 1)) * reshape(y, (1, math.prod(y.shape)))
