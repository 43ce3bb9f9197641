# 05.1: the gradient by weight belongs to the x of another layer
class Linear:
    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def forward(self, x):
        Linear.x = x
        return x @ self.weight.T + self.bias

    def backward(self, dy):
        rows, cotangents = Linear.x.reshape(-1, Linear.x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        return dy @ self.weight, cotangents.T @ rows, cotangents.sum(axis=0)
