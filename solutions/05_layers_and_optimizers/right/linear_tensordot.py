# 05.1: tensordot over all axes but the last
import numpy as np


class Linear:
    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def forward(self, x):
        self.x = x
        return x @ self.weight.T + self.bias

    def backward(self, dy):
        axes = tuple(range(dy.ndim - 1))
        return np.dot(dy, self.weight), np.tensordot(dy, self.x, (axes, axes)), dy.sum(axes)
