# 03.2: cannot reshape array of size 30 into shape (1,2,3)
def back(g, shape):
    if g.ndim > len(shape):
        return g.sum(axis=tuple(range(g.ndim - len(shape))))
    return g.sum(axis=tuple(i for i, extent in enumerate(shape) if extent != g.shape[i]), keepdims=True)


def matmul_backward(gradient, x, y, unbroadcast):
    row = x[None, :] if x.ndim == 1 else x
    column = y[:, None] if y.ndim == 1 else y
    if y.ndim == 1:
        gradient = gradient[..., None]
    if x.ndim == 1:
        gradient = gradient[..., None, :]
    of_row = back(gradient @ column.swapaxes(-1, -2), row.shape)
    of_column = back(row.swapaxes(-1, -2) @ gradient, column.shape)
    return of_row.reshape(x.shape), of_column.reshape(y.shape)
