# 01.1: as a difference quotient is
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
        return Value(self.data * other.data, (self, other), slopes(lambda a, b: a * b, self, other))

    def __truediv__(self, other):
        other = lift(other)
        return Value(self.data / other.data, (self, other), slopes(lambda a, b: a / b, self, other))

    def __pow__(self, n):
        return Value(self.data ** n, (self,), slopes(lambda a: a ** n, self))

    def tanh(self):
        t = math.tanh(self.data)
        return Value(t, (self,), slopes(math.tanh, self))

    def exp(self):
        e = math.exp(self.data)
        return Value(e, (self,), slopes(math.exp, self))

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


def slopes(f, *operands, h=1e-6):
    """By one-sided differences."""
    at = [x.data for x in operands]
    moved = [[x + h * (i == k) for k, x in enumerate(at)] for i in range(len(at))]
    return [(f(*point) - f(*at)) / h for point in moved]
