# 03.2: the other operand isn't transposed
def matmul_backward(gradient, x, y, unbroadcast):
    return unbroadcast(gradient @ y, x.shape), unbroadcast(x @ gradient, y.shape)
