# 02.2: one array for all directions, whose 1 is set and taken away again
import numpy as np


def jvp(f, x, v, Dual):
    """f at x and its derivative in the direction v, (y, J·v), out of one call of f: two float arrays of m numbers.

    f     takes a list of n Duals, returns a list of m Duals, or plain numbers where an output doesn't depend on x
    x, v  float arrays of n numbers
    Dual  the class of 02.1
    """
    outputs = f([Dual(value, tangent) for value, tangent in zip(x, v, strict=True)])
    outputs = [y if isinstance(y, Dual) else Dual(y, 0.0) for y in outputs]
    return np.array([y.value for y in outputs]), np.array([y.tangent for y in outputs])


def jacobian_by_columns(f, x, Dual):
    """The Jacobian of f at x, J[i, j] = ∂fᵢ/∂xⱼ, a float array of shape (m, n), by n calls of jvp."""
    columns, v = [], np.zeros(len(x))
    for j in range(len(x)):
        v[j] = 1.0
        columns.append(jvp(f, x, v, Dual)[1])
        v[j] = 0.0
    return np.array(columns).T


def jacobian_by_rows(vjp, m):
    """The same Jacobian, a float array of shape (m, n), by m calls of vjp.

    vjp  a function that somebody has made at x by a backward pass: vjp(u) = u·J, from m numbers to n
    m    number of outputs of f
    """
    rows, u = [], np.zeros(m)
    for i in range(m):
        u[i] = 1.0
        rows.append(vjp(u))
        u[i] = 0.0
    return np.array(rows)
