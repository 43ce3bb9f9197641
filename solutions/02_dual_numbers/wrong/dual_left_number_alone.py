# 02.1: with a number on the left the tangent is lost
import math


class Dual:

    def __init__(self, value, tangent=0.0):
        self.value, self.tangent = value, tangent

    def __repr__(self):
        return f"Dual({self.value}, {self.tangent})"

    def __add__(self, other):
        other = lift(other)
        return Dual(self.value + other.value, self.tangent + other.tangent)

    def __radd__(self, other):
        return Dual(other + self.value)

    def __neg__(self):
        return Dual(-self.value, -self.tangent)

    def __sub__(self, other):
        return self + -lift(other)

    def __rsub__(self, other):
        return lift(other) - self

    def __mul__(self, other):
        other = lift(other)
        return Dual(self.value * other.value, self.tangent * other.value + self.value * other.tangent)

    def __rmul__(self, other):
        return lift(other) * self

    def __truediv__(self, other):
        other = lift(other)
        quotient = self.value / other.value
        return Dual(quotient, (self.tangent - quotient * other.tangent) / other.value)

    def __rtruediv__(self, other):
        return lift(other) / self

    def __pow__(self, other):
        other = lift(other)
        value = self.value ** other.value
        by_base = other.value * self.value ** (other.value - 1) * self.tangent
        by_exponent = value * math.log(self.value) * other.tangent if other.tangent else 0.0
        return Dual(value, by_base + by_exponent)

    def __rpow__(self, other):
        return lift(other) ** self

    def exp(self):
        value = math.exp(self.value)
        return Dual(value, value * self.tangent)

    def tanh(self):
        value = math.tanh(self.value)
        return Dual(value, (1 - value * value) * self.tangent)

    def __lt__(self, other):
        return self.value < lift(other).value

    def __gt__(self, other):
        return self.value > lift(other).value


def lift(x):
    return x if isinstance(x, Dual) else Dual(x, 0.0)
