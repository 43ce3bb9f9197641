# 01.1: a.exp() is a Value: yours is None (is there a return?)
import math


class Value:
    def __init__(self, data, parents=(), local=()):
        self.data = float(data)
        self.parents = tuple(parents)
        self.local = tuple(local)
        self.grad = 0.0

    def __add__(self, other):
        other = lift(other)
        return Value(self.data + other.data, (self, other), (1.0, 1.0))

    def __sub__(self, other):
        other = lift(other)
        return Value(self.data - other.data, (self, other), (1.0, -1.0))

    def __mul__(self, other):
        other = lift(other)
        return Value(self.data * other.data, (self, other), (other.data, self.data))

    def __truediv__(self, other):
        other = lift(other)
        return Value(self.data / other.data, (self, other), (1 / other.data, -self.data / other.data ** 2))

    def __pow__(self, n):
        return Value(self.data ** n, (self,), (n * self.data ** (n - 1),))

    def tanh(self):
        t = math.tanh(self.data)
        return Value(t, (self,), (1 - t * t,))

    def exp(self):
        e = math.exp(self.data)
        Value(e, (self,), (e,))

    def __radd__(self, other):
        return lift(other) + self

    def __rsub__(self, other):
        return lift(other) - self

    def __rmul__(self, other):
        return lift(other) * self

    def __rtruediv__(self, other):
        return lift(other) / self

    def __repr__(self):
        return f"Value({self.data:.4g}, grad={self.grad:.4g})"


def lift(x):
    return x if isinstance(x, Value) else Value(x)
