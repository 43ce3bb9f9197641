# 05.1: weight or bias has other numbers after the calls
class Linear:

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def forward(self, x):
        self.x = x
        return x @ self.weight.T + self.bias

    def backward(self, dy):
        rows, cotangents = self.x.reshape(-1, self.x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        self.weight -= 0.1 * (cotangents.T @ rows)
        return dy @ self.weight, cotangents.T @ rows, cotangents.sum(axis=0)
