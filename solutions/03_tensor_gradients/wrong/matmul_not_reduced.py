# 03.2: not reduced over broadcast batches
def matmul_backward(gradient, x, y, unbroadcast):
    row = x[None, :] if x.ndim == 1 else x
    column = y[:, None] if y.ndim == 1 else y
    if y.ndim == 1:
        gradient = gradient[..., None]
    if x.ndim == 1:
        gradient = gradient[..., None, :]
    of_row = gradient @ column.swapaxes(-1, -2)
    of_column = row.swapaxes(-1, -2) @ gradient
    if x.ndim == 1 and of_row.size == x.size:
        of_row = of_row.reshape(x.shape)
    if y.ndim == 1 and of_column.size == y.size:
        of_column = of_column.reshape(y.shape)
    return of_row, of_column
