# 05.1: the gradients of earlier calls are still in there
import numpy as np


class Linear:
    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias
        self.by_weight, self.by_bias = np.zeros_like(weight), np.zeros_like(bias)

    def forward(self, x):
        self.x = x
        return x @ self.weight.T + self.bias

    def backward(self, dy):
        rows, cotangents = self.x.reshape(-1, self.x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        self.by_weight += cotangents.T @ rows
        self.by_bias += cotangents.sum(axis=0)
        return dy @ self.weight, self.by_weight, self.by_bias
