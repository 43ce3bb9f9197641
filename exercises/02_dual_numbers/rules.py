"""Dual numbers that follow rules, of which some may be wrong; and numbers with a step, that need no rules."""

import math

import numpy as np

NAMES = "xyne"      # their tangents are called dx, …; x, y, e > 0, n < 0; e has the value of x and another tangent


class Step(complex):
    """A complex number whose imaginary part is a step so small that it vanishes beside 1; it compares by its real part.

    The imaginary part of f(x + i·h·ẋ), over h, is the derivative to all digits. Source: Squire and Trapp, 1998.
    """

    def __lt__(self, other):
        return self.real < complex(other).real

    def __gt__(self, other):
        return self.real > complex(other).real


TINY = 1e-30

# Tangents of a op b, of the values a, b, their tangents ȧ, ḃ and the result.
RULES = {
    "add": lambda a, da, b, db, out: da + db, "sub": lambda a, da, b, db, out: da - db,
    "mul": lambda a, da, b, db, out: da * b + a * db, "div": lambda a, da, b, db, out: (da - out * db) / b,
    "pow": lambda a, da, b, db, out: b * a ** (b - 1) * da + (out * np.log(a) * db if db else 0.0),
    "neg": lambda a, da, out: -da, "exp": lambda a, da, out: out * da, "tanh": lambda a, da, out: (1 - out * out) * da,
    "swapped": (), "left": None, "less": lambda a, da, b, db: a < b, "greater": None,
}     # swapped: ops that take a number on the left for one on the right; left: the tangent of what has one, if another
#       than the op's; greater: if another than less with its sides exchanged
VALUES = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
          "pow": lambda a, b: a ** b}


def numbers(rules):
    """A class of dual numbers that follows these rules."""
    class Number:
        def __init__(self, value, tangent):
            self.value, self.tangent = value, tangent

        def __neg__(self):
            return Number(-self.value, rules["neg"](self.value, self.tangent, -self.value))

        def apply(self, name, function):
            out = function(self.value)
            return Number(out, rules[name](self.value, self.tangent, out))

        def __lt__(self, other):
            other = number(other)
            return rules["less"](self.value, self.tangent, other.value, other.tangent)

        def __gt__(self, other):
            other = number(other)
            if rules["greater"]:
                return rules["greater"](self.value, other.value)
            return rules["less"](other.value, other.tangent, self.value, self.tangent)

    def number(x):
        return x if isinstance(x, Number) else Number(x, 0.0)

    def operator(op, x, y):
        left = rules["left"] and not isinstance(x, Number)
        x, y = number(x), number(y)
        out = VALUES[op](x.value, y.value)
        return Number(out, rules["left"](y.tangent) if left
                      else rules[op](x.value, x.tangent, y.value, y.tangent, out))

    for op, method in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("div", "truediv"), ("pow", "pow")):
        setattr(Number, f"__{method}__", lambda x, y, op=op: operator(op, x, y))
        setattr(Number, f"__r{method}__", lambda x, y, op=op: operator(op, x, y) if op in rules["swapped"]
                else operator(op, y, x))
    return Number


def with_rules(**wrong):
    """What duals give that follow RULES but for these."""
    def outputs(case):
        Number = numbers(RULES | wrong)
        names = {name: Number(case[name], case["d" + name]) for name in NAMES}
        names |= {"exp": lambda x: x.apply("exp", math.exp), "tanh": lambda x: x.apply("tanh", math.tanh)}
        with np.errstate(all="ignore"):
            found = {text: eval(text, {}, names) for text in case["expressions"]}
        return {"value": {text: out.value for text, out in found.items()},
                "tangent": {text: out.tangent for text, out in found.items()}}
    return outputs
