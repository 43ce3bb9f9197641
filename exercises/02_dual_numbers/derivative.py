"""02.3 A derivative inside a derivative.

d/dx [x · d/dy (x + y)] is 1: the inner derivative is 1, and x·1 changes with x as fast as x. Naive dual numbers say 2.
While the inner derivative is taken, x carries a tangent too, the outer one's, and ε is ε. The remedy: every derivative
that is under way has an ε of its own, and a Dual says whose its tangent is.
"""

import itertools
import math

new_level = itertools.count(1).__next__     # each call gives a number that is higher than all before


class Dual:
    """A value and its tangent, for the derivative that has the number `level`.

    Both are numbers, or Duals of lower levels: those of derivatives that began earlier and are still under way.
    """

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
    """The level of a Dual; 0 of a plain number."""
    return x.level if isinstance(x, Dual) else 0


def parts(x, level):
    """(value, tangent) of x for the derivative `level`."""
    raise NotImplementedError("begin with a Dual of just this level. And what is x to this derivative if it has "
                              "another level, or none?")


def add(x, y):
    """x + y, of Duals of any level and numbers."""
    raise NotImplementedError("begin with the level: the higher of the two. Then the parts of both at that level")


def mul(x, y):
    """x * y, of Duals of any level and numbers."""
    raise NotImplementedError("begin with the level, as in add; the values and tangents may be Duals themselves, so "
                              "use + and * on them")


def exp(x):
    """e to the power of x, of a Dual of any level or a number."""
    raise NotImplementedError("begin with a plain number, for which there is math.exp; of a Dual, the value may be a "
                              "Dual again")


def derivative(f, x):
    """df/dx at x. f takes a number and gives one, by +, * and exp; x is a number.

    f may use numbers of the derivatives around it, and take derivatives itself; x may be one of those numbers, and
    then the result depends on it.
    """
    raise NotImplementedError("begin with a new level, and f of the Dual that stands for x. f may give something that"
                              " doesn't depend on x")
