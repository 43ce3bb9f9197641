# 03.2: with matrices and batches it is right, with a vector it isn't
def matmul_backward(gradient, x, y, unbroadcast):
    of_x = gradient @ y.swapaxes(-1, -2)
    of_y = x.swapaxes(-1, -2) @ gradient
    return unbroadcast(of_x, x.shape), unbroadcast(of_y, y.shape)
