# 03.2: batches: .T turns all axes round
def matmul_backward(gradient, x, y, unbroadcast):
    row = x[None, :] if x.ndim == 1 else x
    column = y[:, None] if y.ndim == 1 else y
    if y.ndim == 1:
        gradient = gradient[..., None]
    if x.ndim == 1:
        gradient = gradient[..., None, :]
    of_row = unbroadcast(gradient @ column.T, row.shape)
    of_column = unbroadcast(row.T @ gradient, column.shape)
    return of_row.reshape(x.shape), of_column.reshape(y.shape)
