"""Jacobians and Hessians, a column or a row at a time.

    jacfwd   one JVP per input element: column by column; cheap for few inputs
    jacrev   one VJP per output element: row by row; cheap for few outputs
    hessian  forward over reverse

Inputs and outputs may be nested arrays: the result has the output's nesting,
and in place of each output array the input's, of blocks d(output)/d(input).
"""

from ..backend import is_whole, wholes, zeros_like
from .ops.shape import concatenate, reshape, transpose
from .primitive import lower
from .transforms import _array, check_function, grad, jvp, positions, vjp
from .tree import flatten


def _basis(values):
    """(which value, basis vector as one array per value), for each element of the values in turn."""
    zeros = [zeros_like(lower(v)) for v in values]
    for k, v in enumerate(zeros):
        for i in range(v.size):
            e = zeros_like(v)
            e.reshape(-1)[i] = 1
            yield k, [*zeros[:k], e, *zeros[k + 1:]]


def _block(slices, front, back, columns=False):
    """Slices of one shape as the rows (or columns) of a matrix, shaped (*front, *back)."""
    flat = concatenate([reshape(s, (1, lower(s).size)) for s in slices], 0)
    return reshape(transpose(flat, (1, 0)) if columns else flat, (*front, *back))


def _of_chosen(f, args, argnums):
    """(f as a function of the chosen argument alone, that argument): a tuple of them where argnums is a tuple."""
    chosen = positions(wholes("argnums", argnums), args)

    def of_x(x):
        full = list(args)
        for i, value in zip(chosen, (x,) if is_whole(argnums) else x, strict=True):
            full[i] = value
        return f(*full)
    return of_x, args[chosen[0]] if is_whole(argnums) else tuple(args[i] for i in chosen)


def jacfwd(f, argnums=0):
    """A function that returns df/dx, blocks of shape (*output shape, *input shape), by one JVP per input element."""
    check_function("jacfwd", f)

    def jacobian(*args):
        of_x, x = _of_chosen(f, args, argnums)
        values, rebuild = flatten(x)
        values = [_array(v, f"input {i}") for i, v in enumerate(values)]
        columns = [[] for _ in values]
        for k, direction in _basis(values):
            _, tangent = jvp(of_x, (rebuild(values),), (rebuild(direction),))
            tangents, rebuild_out = flatten(tangent)
            columns[k].append(tangents)
        if not columns or not all(columns):
            raise ValueError(f"jacfwd: inputs of shapes {[v.shape for v in values]}: there is none, or one has no "
                             "element")
        return rebuild_out([rebuild([_block([c[o] for c in of_v], t.shape, v.shape, columns=True)
                                     for of_v, v in zip(columns, values, strict=True)])
                            for o, t in enumerate(tangents)])
    return jacobian


def jacrev(f, argnums=0):
    """A function that returns df/dx, blocks of shape (*output shape, *input shape), by one VJP per output element."""
    check_function("jacrev", f)

    def jacobian(*args):
        of_x, x = _of_chosen(f, args, argnums)
        y, pull = vjp(of_x, x)
        values, rebuild = flatten(x)
        outs, rebuild_out = flatten(y)
        rows = [[] for _ in outs]
        for o, ct in _basis(outs):
            rows[o].append(flatten(pull(rebuild_out(ct)))[0])
        if not all(rows):
            raise ValueError(f"jacrev: outputs of shapes {[y.shape for y in outs]}: one has no element")
        return rebuild_out([rebuild([_block([r[k] for r in of_y], y.shape, getattr(v, "shape", ()))
                                     for k, v in enumerate(values)])
                            for of_y, y in zip(rows, outs, strict=True)])
    return jacobian


def hessian(f, argnums=0):
    """A function that returns d²f/dx², blocks of shape (*input shape, *input shape), forward over reverse; f gives a
    number."""
    return jacfwd(grad(f, argnums), argnums)


def hvp(f, x, v):
    """The Hessian of f at x times v, at the price of a few gradients, without the matrix. Source: Pearlmutter 1994."""
    check_function("hvp", f, "f, x, v")
    return jvp(grad(f), (x,), (v,))[1]
