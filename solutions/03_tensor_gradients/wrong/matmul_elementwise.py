# 03.2: multiplied element by element
def matmul_backward(gradient, x, y, unbroadcast):
    return unbroadcast(gradient * y, x.shape), unbroadcast(gradient * x, y.shape)
