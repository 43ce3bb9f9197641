"""Jacobians and Hessians, a column or a row at a time.

    jacfwd   one JVP per input element: column by column; cheap for few inputs
    jacrev   one VJP per output element: row by row; cheap for few outputs
    hessian  forward over reverse
"""

from ..backend import xp
from .primitive import lower
from .transforms import grad, jvp, vjp


def _unit(like, i):
    """The i-th basis vector in like's shape."""
    e = xp.zeros(like.size, like.dtype)
    e[i] = 1
    return e.reshape(like.shape)


def _stack(slices, front, back, last):
    """Stack arrays or traced values along a new axis 0 (rows) or as the last (columns), and give it its shape."""
    from .ops.shape import concatenate, reshape, transpose
    count = len(slices)
    flat = concatenate([reshape(s, (1, -1)) for s in slices], 0)
    return reshape(transpose(flat, (1, 0)) if last else flat, (*front, *back)) if count else None


def _sized(x):
    return lower(x) if hasattr(lower(x), "size") else xp.asarray(x)


def jacfwd(f, argnums=0):
    """A function that returns df/dx of shape (*output shape, *input shape), by one JVP per input element."""
    def jacobian(*args):
        x = args[argnums]

        def of_x(z):
            return f(*args[:argnums], z, *args[argnums + 1:])
        like = _sized(x)
        if not like.size:
            raise ValueError(f"jacfwd: the input of shape {like.shape} has no element")
        columns = [jvp(of_x, (x,), (_unit(like, i),))[1] for i in range(like.size)]
        return _stack(columns, columns[0].shape, like.shape, last=True)
    return jacobian


def jacrev(f, argnums=0):
    """A function that returns df/dx of shape (*output shape, *input shape), by one VJP per output element."""
    def jacobian(*args):
        x = args[argnums]
        y, pull = vjp(lambda z: f(*args[:argnums], z, *args[argnums + 1:]), x)
        like = _sized(y)
        if not like.size:
            raise ValueError(f"jacrev: the output of shape {like.shape} has no element")
        rows = [pull(_unit(like, i))[0] for i in range(like.size)]
        return _stack(rows, like.shape, _sized(x).shape, last=False)
    return jacobian


def hessian(f, argnums=0):
    """A function that returns d²f/dx² of shape (*input shape, *input shape), forward over reverse; f gives a number."""
    return jacfwd(grad(f, argnums), argnums)


def hvp(f, x, v):
    """The Hessian of f at x times v, at the price of a few gradients, without the matrix. Source: Pearlmutter 1994."""
    return jvp(grad(f), (x,), (v,))[1]
