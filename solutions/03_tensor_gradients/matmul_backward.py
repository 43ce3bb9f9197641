"""03.2 Backward of @, in every rank.

For two matrices the rule is two products, each with the other matrix transposed. The rest is what NumPy calls a matrix:
leading axes are batches and are broadcast, a vector on the left is a row, one on the right a column, and the axis
that it lent is dropped again.
"""


def matmul_backward(gradient, x, y, unbroadcast):
    """The gradients of x and y, where x @ y was computed: a pair of arrays of their shapes.

    gradient     array of the shape of x @ y
    x, y         arrays of one axis or more: (k,), (n, k), (…, n, k) and (k,), (k, m), (…, k, m)
    unbroadcast  yours, of 03.1: unbroadcast(gradient, shape)
    """
    # begin with two matrices, of unequal extents: which products have the shapes of x and of y? Then batches, where
    # only the last two axes are transposed. Then vectors: give each its second axis back, and the gradient, too
    row = x[None, :] if x.ndim == 1 else x
    column = y[:, None] if y.ndim == 1 else y
    if y.ndim == 1:
        gradient = gradient[..., None]
    if x.ndim == 1:
        gradient = gradient[..., None, :]
    of_row = unbroadcast(gradient @ column.swapaxes(-1, -2), row.shape)
    of_column = unbroadcast(row.swapaxes(-1, -2) @ gradient, column.shape)
    return of_row.reshape(x.shape), of_column.reshape(y.shape)
