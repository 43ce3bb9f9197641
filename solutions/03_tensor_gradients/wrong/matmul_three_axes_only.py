# 03.2: axes don't match array
def matmul_backward(gradient, x, y, unbroadcast):
    def t(a):
        return a.transpose(0, 2, 1) if a.ndim > 2 else a.T
    row = x[None, :] if x.ndim == 1 else x
    column = y[:, None] if y.ndim == 1 else y
    if y.ndim == 1:
        gradient = gradient[..., None]
    if x.ndim == 1:
        gradient = gradient[..., None, :]
    of_row = unbroadcast(gradient @ t(column), row.shape)
    of_column = unbroadcast(t(row) @ gradient, column.shape)
    return of_row.reshape(x.shape), of_column.reshape(y.shape)
