"""Derivatives inside derivatives: what they are, and what comes out when their levels are confused."""

import functools
import itertools
import math

# Texts with D for the derivative, and what they are by pencil and paper. In [0] the mistake has its classic form.
TEXTS = {
    "D(lambda x: x * D(lambda y: x + y, a), b)": lambda a, b: 1.0,
    "D(lambda x: x * D(lambda y: y + x, a), b)": lambda a, b: 1.0,
    "D(lambda x: x * D(lambda y: x * y * y, a), b)": lambda a, b: 4 * a * b,
    "D(lambda x: x * D(lambda y: x * x, a), b)": lambda a, b: 0.0,
    "D(lambda x: 3.0, a)": lambda a, b: 0.0,
    "D(lambda x: x * x * x + 2 * x, a)": lambda a, b: 3 * a * a + 2,
    "D(lambda x: D(lambda y: y * y * y, x), b)": lambda a, b: 6 * b,
    "D(lambda x: x * D(lambda y: x * y * y, x), b)": lambda a, b: 6 * b * b,
    "D(lambda x: D(lambda y: D(lambda z: exp(z * z), y), x), a)":
        lambda a, b: (12 * a + 8 * a ** 3) * math.exp(a * a),
    "D(lambda x: D(lambda y: D(lambda z: x * y * z * z, y), x), b)": lambda a, b: 8 * b,
    "D(lambda x: D(lambda y: y * y * D(lambda z: y * z, x), x), b)": lambda a, b: 6 * b,
    "D(lambda x: D(lambda y: y * y * y, x * x), b)": lambda a, b: 12 * b ** 3,
    "D(lambda x: exp(x * D(lambda y: exp(x * y), a)), b)":
        lambda a, b: math.exp(b * b * math.exp(a * b)) * (2 * b + a * b * b) * math.exp(a * b),
    "D(lambda x: D(lambda y: y * y, a) * x, b) + D(lambda x: x * x, b)": lambda a, b: 2 * a + 2 * b,
}


def to_some_digits(case, got):
    """Of a derivative in which there is no other, only the first digits are right."""
    text = "D(lambda x: x * x * x + 2 * x, a)"
    return 1e-12 < abs(got["derivative"][text] / TEXTS[text](case["a"], case["b"]) - 1) < 1e-3


def nested(levels=None, choose=max, lowered="", any_result=False, chain=True,
           product="both", part=1):
    """What derivatives give for the texts that work like this:

    levels      the argument's level -> the level of a new derivative; None: a new one
    choose      levels of two operands -> level of the result
    lowered     "x", "exp" or "parts": where a value is made a plain number
    any_result  the tangent of a result is taken, whatever its level
    chain       whether exp multiplies by the tangent
    product     "both" terms of the product rule, "left" (ȧ·b) or "right" alone, or "all" three with ȧ·ḃ
    part        of a result: 0 the value, 1 the tangent
    """
    class Number:
        def __init__(self, value, tangent, level):
            self.value, self.tangent, self.level = value, tangent, level

        def __add__(self, other):
            return add(self, other)

        def __mul__(self, other):
            return mul(self, other)

        __radd__, __rmul__ = __add__, __mul__

    def level_of(x):
        return x.level if isinstance(x, Number) else 0

    def parts(x, level):
        return (x.value, x.tangent) if level_of(x) == level else (bare(x) if lowered == "parts" else x, 0.0)

    def bare(x):
        return bare(x.value) if isinstance(x, Number) else x

    def both(x, y):
        level = choose(level_of(x), level_of(y))
        return level, parts(x, level), parts(y, level)

    def add(x, y):
        if not isinstance(x, Number) and not isinstance(y, Number):
            return x + y
        level, (a, da), (b, db) = both(x, y)
        return Number(add(a, b), add(da, db), level)

    def mul(x, y):
        if not isinstance(x, Number) and not isinstance(y, Number):
            return x * y
        level, (a, da), (b, db) = both(x, y)
        terms = {"both": [(da, b), (a, db)], "left": [(da, b)], "right": [(a, db)],
                 "all": [(da, b), (a, db), (da, db)]}[product]
        return Number(mul(a, b), functools.reduce(add, (mul(*term) for term in terms)), level)

    def exp(x):
        if not isinstance(x, Number):
            return math.exp(x)
        value = exp(bare(x) if lowered == "exp" else x.value)
        return Number(value, mul(value, x.tangent) if chain else value, x.level)

    new_level = itertools.count(1).__next__

    def derivative(f, x):
        level = new_level() if levels is None else levels(level_of(x))
        y = f(Number(bare(x) if lowered == "x" else x, 1.0, level))
        return parts(y, level_of(y) if any_result and isinstance(y, Number) else level)[part]

    def outputs(case):
        found = {}
        for text in case["texts"]:
            found[text] = eval(text, {"D": derivative, "exp": exp, "a": case["a"], "b": case["b"]})
        return {"derivative": found}
    return outputs
