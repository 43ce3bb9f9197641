"""02.2 A Jacobian, by columns and by rows.

A function from n numbers to m numbers has m × n derivatives. One pass with duals gives one column of them, J·v with
v = a basis vector. One backward pass gives one row, u·J. Who has many inputs and one output wants rows, and that is why
neural networks are trained with backward passes.
"""

import numpy as np


def jvp(f, x, v, Dual):
    """f at x and its derivative in the direction v, (y, J·v), out of one call of f: two float arrays of m numbers.

    f     takes a list of n Duals, returns a list of m Duals, or plain numbers where an output doesn't depend on x
    x, v  float arrays of n numbers
    Dual  the class of 02.1
    """
    raise NotImplementedError("begin with the list of n Duals: which number goes into value, which into tangent?")


def jacobian_by_columns(f, x, Dual):
    """The Jacobian of f at x, J[i, j] = ∂fᵢ/∂xⱼ, a float array of shape (m, n), by n calls of jvp."""
    raise NotImplementedError("begin with one column: which direction v makes J·v the column j?")


def jacobian_by_rows(vjp, m):
    """The same Jacobian, a float array of shape (m, n), by m calls of vjp.

    vjp  a function that somebody has made at x by a backward pass: vjp(u) = u·J, from m numbers to n
    m    number of outputs of f
    """
    raise NotImplementedError("begin with one row: which u makes u·J the row i?")
