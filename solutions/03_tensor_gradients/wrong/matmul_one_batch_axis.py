# 03.2: the gradient of x has shape [5, 2, 3]; expected [2, 3]
def matmul_backward(gradient, x, y, unbroadcast):
    if x.ndim == 2 and y.ndim > 2:
        return (gradient @ y.swapaxes(-1, -2)).sum(axis=0), x.T @ gradient
    row = x[None, :] if x.ndim == 1 else x
    column = y[:, None] if y.ndim == 1 else y
    if y.ndim == 1:
        gradient = gradient[..., None]
    if x.ndim == 1:
        gradient = gradient[..., None, :]
    of_row = unbroadcast(gradient @ column.swapaxes(-1, -2), row.shape)
    of_column = unbroadcast(row.swapaxes(-1, -2) @ gradient, column.shape)
    return of_row.reshape(x.shape), of_column.reshape(y.shape)
