# 02.3: right to some digits only
import itertools
import math

new_level = itertools.count(1).__next__     # each call gives a number that is higher than all before


class Dual:

    def __init__(self, value, tangent, level):
        self.value, self.tangent, self.level = value, tangent, level

    def __repr__(self):
        return f"Dual({self.value}, {self.tangent}, level={self.level})"

    def __add__(self, other):
        return add(self, other)

    def __mul__(self, other):
        return mul(self, other)

    __radd__, __rmul__ = __add__, __mul__


def level_of(x):
    return x.level if isinstance(x, Dual) else 0


def parts(x, level):
    return (x.value, x.tangent) if level_of(x) == level else (x, 0.0)


def add(x, y):
    level = max(level_of(x), level_of(y))
    (a, da), (b, db) = parts(x, level), parts(y, level)
    return Dual(a + b, da + db, level)


def mul(x, y):
    level = max(level_of(x), level_of(y))
    (a, da), (b, db) = parts(x, level), parts(y, level)
    return Dual(a * b, da * b + a * db, level)


def exp(x):
    if not isinstance(x, Dual):
        return math.exp(x)
    value = exp(x.value)
    return Dual(value, value * x.tangent, x.level)


def derivative(f, x):
    h = 1e-6
    return (f(x + h) + -1 * f(x + -h)) * (0.5 / h)
