# 05.1: the next call writes over what an earlier one returned, or the caller does
class Linear:
    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def forward(self, x):
        self.x = x
        return x @ self.weight.T + self.bias

    def backward(self, dy):
        rows, cotangents = self.x.reshape(-1, self.x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        return dy @ self.weight, cotangents.T @ rows, dy if dy.ndim == 1 else cotangents.sum(axis=0)
