# 03.2: float64 comes out where float32 went in
def matmul_backward(gradient, x, y, unbroadcast):
    x, y = x.astype(float), y.astype(float)
    row = x[None, :] if x.ndim == 1 else x
    column = y[:, None] if y.ndim == 1 else y
    if y.ndim == 1:
        gradient = gradient[..., None]
    if x.ndim == 1:
        gradient = gradient[..., None, :]
    of_row = unbroadcast(gradient @ column.swapaxes(-1, -2), row.shape)
    of_column = unbroadcast(row.swapaxes(-1, -2) @ gradient, column.shape)
    return of_row.reshape(x.shape), of_column.reshape(y.shape)
