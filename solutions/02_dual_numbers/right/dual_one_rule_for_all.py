# 02.1: partial derivatives as functions, x ** y by exp and log
import math


class Dual:
    def __init__(self, value, tangent=0.0):
        self.value = value
        self.tangent = tangent

    def _binary(self, other, f, df):
        if not hasattr(other, "tangent"):
            other = Dual(other)
        by_a, by_b = df(self.value, other.value)
        return Dual(f(self.value, other.value), by_a * self.tangent + by_b * other.tangent)

    def __add__(self, other):
        return self._binary(other, lambda a, b: a + b, lambda a, b: (1, 1))

    __radd__ = __add__

    def __sub__(self, other):
        return self._binary(other, lambda a, b: a - b, lambda a, b: (1, -1))

    def __rsub__(self, other):
        return Dual(other) - self

    def __neg__(self):
        return 0 - self

    def __mul__(self, other):
        return self._binary(other, lambda a, b: a * b, lambda a, b: (b, a))

    __rmul__ = __mul__

    def __truediv__(self, other):
        return self._binary(other, lambda a, b: a / b, lambda a, b: (1 / b, -a / b ** 2))

    def __rtruediv__(self, other):
        return Dual(other) / self

    def __pow__(self, other):
        if isinstance(other, Dual):
            return (other * self.log()).exp()
        return Dual(self.value ** other, other * self.value ** (other - 1) * self.tangent)

    def __rpow__(self, other):
        return (self * math.log(other)).exp()

    def log(self):
        return Dual(math.log(self.value), self.tangent / self.value)

    def exp(self):
        e = math.exp(self.value)
        return Dual(e, e * self.tangent)

    def tanh(self):
        return Dual(math.tanh(self.value), self.tangent / math.cosh(self.value) ** 2)

    def __lt__(self, other):
        return (self - other).value < 0

    def __gt__(self, other):
        return (self - other).value > 0
