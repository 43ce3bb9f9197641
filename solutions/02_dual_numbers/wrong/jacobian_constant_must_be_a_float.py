# 02.2: 'int' object has no attribute 'value'
import numpy as np


def jvp(f, x, v, Dual):
    """f at x and its derivative in the direction v, (y, J·v), out of one call of f: two float arrays of m numbers.

    f     takes a list of n Duals, returns a list of m Duals, or plain numbers where an output doesn't depend on x
    x, v  float arrays of n numbers
    Dual  the class of 02.1
    """
    outputs = f([Dual(value, tangent) for value, tangent in zip(x, v, strict=True)])
    outputs = [Dual(y, 0.0) if isinstance(y, float) else y for y in outputs]
    return np.array([y.value for y in outputs]), np.array([y.tangent for y in outputs])


def jacobian_by_columns(f, x, Dual):
    """The Jacobian of f at x, J[i, j] = ∂fᵢ/∂xⱼ, a float array of shape (m, n), by n calls of jvp."""
    return np.stack([jvp(f, x, e, Dual)[1] for e in np.eye(len(x))], axis=1)


def jacobian_by_rows(vjp, m):
    """The same Jacobian, a float array of shape (m, n), by m calls of vjp.

    vjp  a function that somebody has made at x by a backward pass: vjp(u) = u·J, from m numbers to n
    m    number of outputs of f
    """
    return np.stack([vjp(u) for u in np.eye(m)])
