"""01.1 What every operation must remember.

A Value is a number that knows what it was made from: its parents, and by how much it moves when each of them does.
That is all that differentiation will need later; nothing is propagated yet.
"""

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
        raise NotImplementedError("begin with __add__ above: what changes when other is subtracted, in the number and"
                                  " in its derivatives?")

    def __mul__(self, other):
        other = lift(other)
        raise NotImplementedError("begin with a·b as a function of a alone: what is its slope? Both derivatives are "
                                  "numbers, known right here")

    def __truediv__(self, other):
        other = lift(other)
        raise NotImplementedError("begin with the derivative of a/b by b, on paper")

    def __pow__(self, n):
        """self to the power of n, a plain number: so there is one parent."""
        raise NotImplementedError("begin with the power rule; one parent means (self,), with the comma")

    def tanh(self):
        raise NotImplementedError("begin with t = math.tanh(self.data): its derivative is a short formula in t")

    def exp(self):
        raise NotImplementedError("begin with e = math.exp(self.data): what is its derivative?")

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
