# 01.1: an operation changes one of its operands
import math


class Value:
    """A number in a computation.

    data     the number
    parents  the Values that it was computed from, in the order of the operation; () for a leaf
    local    ∂data/∂parent for each parent, floats
    grad     ∂(the result)/∂data, when backward has run
    """

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
        self.data -= other.data
        self.parents, self.local = (self, other), (1.0, -1.0)
        return self

    def __mul__(self, other):
        other = lift(other)
        return Value(self.data * other.data, (self, other), (other.data, self.data))

    def __truediv__(self, other):
        other = lift(other)
        return Value(self.data / other.data, (self, other), (1 / other.data, -self.data / other.data ** 2))

    def __pow__(self, n):
        """self to the power of n, a plain number: so there is one parent."""
        return Value(self.data ** n, (self,), (n * self.data ** (n - 1),))

    def tanh(self):
        t = math.tanh(self.data)
        return Value(t, (self,), (1 - t * t,))

    def exp(self):
        e = math.exp(self.data)
        return Value(e, (self,), (e,))

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
    """A Value from a Value or a number."""
    return x if isinstance(x, Value) else Value(x)
