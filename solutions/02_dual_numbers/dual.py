"""02.1 A number and its derivative.

A dual number is value + tangent·ε with ε·ε = 0. Compute with such numbers, and beside every value its derivative along
one direction falls out: no formula of the whole function is ever written down, and no step width is chosen.
"""

import math


class Dual:
    """A value and how fast it changes.

    value    float
    tangent  float: the derivative of the value in the direction that is asked for
    """

    def __init__(self, value, tangent=0.0):
        self.value, self.tangent = value, tangent

    def __repr__(self):
        return f"Dual({self.value}, {self.tangent})"

    def __add__(self, other):
        """self + other. Here and below, other is a Dual or a plain number."""
        # begin with Dual + Dual: add the values, add the tangents. Then ask what lift(other) is good for
        other = lift(other)
        return Dual(self.value + other.value, self.tangent + other.tangent)

    def __radd__(self, other):
        """other + self, where other is a plain number: Python asks for it when float doesn't know how to add a Dual."""
        # begin with lift(other), which is a Dual and can be added
        return lift(other) + self

    def __neg__(self):
        """-self."""
        # begin with the tangent: what is the derivative of -x?
        return Dual(-self.value, -self.tangent)

    def __sub__(self, other):
        """self - other."""
        # begin with what you have: __add__ and __neg__, or two differences
        return self + -lift(other)

    def __rsub__(self, other):
        """other - self, where other is a plain number."""
        # begin with which of the two stands on the left
        return lift(other) - self

    def __mul__(self, other):
        """self * other."""
        # begin with (a + ȧε)·(b + ḃε), multiplied out; ε·ε = 0
        other = lift(other)
        return Dual(self.value * other.value, self.tangent * other.value + self.value * other.tangent)

    def __rmul__(self, other):
        """other * self, where other is a plain number."""
        # begin with lift(other)
        return lift(other) * self

    def __truediv__(self, other):
        """self / other."""
        # begin with q = a/b, that is q·b = a: the product rule says q̇·b + q·ḃ = ȧ, and now solve for q̇
        other = lift(other)
        quotient = self.value / other.value
        return Dual(quotient, (self.tangent - quotient * other.tangent) / other.value)

    def __rtruediv__(self, other):
        """other / self, where other is a plain number."""
        # begin with which of the two stands on the left
        return lift(other) / self

    def __pow__(self, other):
        """self ** other. The base may be negative where the exponent is a constant whole number."""
        # begin with x ** 3: exponent times one power less, times the base's tangent. Then 2 ** x: the value times
        # log(base), times the exponent's tangent. x ** y is the sum of both
        other = lift(other)
        value = self.value ** other.value
        by_base = other.value * self.value ** (other.value - 1) * self.tangent
        by_exponent = value * math.log(self.value) * other.tangent if other.tangent else 0.0
        return Dual(value, by_base + by_exponent)

    def __rpow__(self, other):
        """other ** self, where other is a plain number."""
        # begin with which of the two is the base
        return lift(other) ** self

    def exp(self):
        """e to the power of self."""
        # begin with math.exp(self.value): what is the derivative of exp, and what is the chain rule's other factor?
        value = math.exp(self.value)
        return Dual(value, value * self.tangent)

    def tanh(self):
        """The hyperbolic tangent of self."""
        # begin with math.tanh(self.value): the derivative can be written with the result alone
        value = math.tanh(self.value)
        return Dual(value, (1 - value * value) * self.tangent)

    def __lt__(self, other):
        """self < other, a bool. Functions with an `if` in them ask for it; the tangent has no say."""
        # begin with the values
        return self.value < lift(other).value

    def __gt__(self, other):
        """self > other, a bool."""
        # begin with the values
        return self.value > lift(other).value


def lift(x):
    """x as a Dual: a plain number doesn't change, so its tangent is 0."""
    return x if isinstance(x, Dual) else Dual(x, 0.0)
