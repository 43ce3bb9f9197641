# 03.2: the order of the factors is turned
def matmul_backward(gradient, x, y, unbroadcast):
    def turned(a):
        return a.swapaxes(-1, -2)
    return unbroadcast(turned(y) @ gradient, x.shape), unbroadcast(gradient @ turned(x), y.shape)
