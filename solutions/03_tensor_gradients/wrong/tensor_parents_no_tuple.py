# 03.4: the parents of a Tensor are a Tensor, not a tuple
import numpy as np

order = unbroadcast = matmul_backward = RULES = None     # yours, of 01.2 and 03.1 to 03.3: the check puts them here


class Tensor:

    def __init__(self, data, parents=(), pull=None):
        self.data, self.parents, self.pull, self.grad = np.asarray(data), parents, pull, None

    def __add__(self, other):
        return Tensor(self.data + other.data, (self, other),
                      lambda g: (unbroadcast(g, self.data.shape), unbroadcast(g, other.data.shape)))

    def __mul__(self, other):
        return Tensor(self.data * other.data, (self, other),
                      lambda g: (unbroadcast(g * other.data, self.data.shape),
                                 unbroadcast(g * self.data, other.data.shape)))

    def __matmul__(self, other):
        return Tensor(self.data @ other.data, (self, other),
                      lambda g: matmul_backward(g, self.data, other.data, unbroadcast))

    def tanh(self):
        t = np.tanh(self.data)
        return Tensor(t, (self), lambda g: (g * (1 - t * t),))

    def sum(self, axis=None, keepdims=False):
        return Tensor(self.data.sum(axis=axis, keepdims=keepdims), (self,),
                      lambda g: (RULES["sum"](g, self.data.shape, axis, keepdims),))

    def transpose(self, axes=None):
        return Tensor(self.data.transpose(axes), (self,), lambda g: (RULES["transpose"](g, axes),))

    def __getitem__(self, index):
        return Tensor(self.data[index], (self,), lambda g: (RULES["getitem"](g, self.data.shape, index),))

    def backward(self, gradient=None):
        gradients = {self: np.ones_like(self.data) if gradient is None else gradient}
        for tensor in reversed(order(self)):
            g = gradients.pop(tensor)
            if tensor.pull is None:
                tensor.grad = np.array(g) if tensor.grad is None else tensor.grad + g
                continue
            for parent, part in zip(tensor.parents, tensor.pull(g), strict=True):
                gradients[parent] = gradients[parent] + part if parent in gradients else part
