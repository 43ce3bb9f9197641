# 05.1: the next call writes over what an earlier one returned
class Linear:
    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def forward(self, x):
        self.x = x
        y = x @ self.weight.T + self.bias
        if not hasattr(self, 'y') or self.y.shape != y.shape:
            self.y = y
        self.y[...] = y
        return self.y

    def backward(self, dy):
        rows, cotangents = self.x.reshape(-1, self.x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        return dy @ self.weight, cotangents.T @ rows, cotangents.sum(axis=0)
