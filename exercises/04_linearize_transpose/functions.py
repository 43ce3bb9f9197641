"""Functions as text, and their derivatives: by complex steps, and by rules with a mistake in them."""

import numpy as np

TINY = 1e-30


class Step:
    """Numbers with an imaginary part so small that it vanishes beside 1: in f(x + i·h·v) it is h·J·v, to all digits.

    Source: Squire and Trapp, Using Complex Variables to Estimate Derivatives of Real Functions, 1998.
    """

    __array_ufunc__ = None

    def __init__(self, z):
        self.z = z

    def __add__(self, other):
        return Step(self.z + bare(other))

    def __mul__(self, other):
        return Step(self.z * bare(other))

    def __rmatmul__(self, W):
        return Step(W @ self.z)

    def __neg__(self):
        return Step(-self.z)

    def __sub__(self, other):
        return self + -other

    def __rsub__(self, other):
        return -self + other

    def sin(self):
        return Step(np.sin(self.z))

    def tanh(self):
        return Step(np.tanh(self.z))

    def sum(self):
        return Step(self.z.sum())

    __radd__, __rmul__ = __add__, __mul__


def bare(x):
    return x.z if isinstance(x, Step) else x


def push(text, case, tangents):
    """(y, J·v) of a text, by a complex step."""
    names = {name: Step(x + 1j * TINY * v) for name, x, v in zip("xys", case["xs"], tangents, strict=True)}
    out = np.asarray(bare(eval(text, {}, names | case["constants"])))
    return np.array(out.real), np.array(out.imag / TINY)


def jacobian(text, case):
    """Per input its block (outputs × elements), column by column."""
    blocks = []
    for k, x in enumerate(case["xs"]):
        columns = []
        for i in range(x.size):
            e = np.zeros(x.size)
            e[i] = 1.0
            v = [e.reshape(x.shape) if j == k else np.zeros_like(other) for j, other in enumerate(case["xs"])]
            columns.append(np.ravel(push(text, case, v)[1]))
        blocks.append(np.stack(columns, axis=1))
    return blocks


# Tangents, of values a, b and tangents da, db. shift and times: by a constant k.
RULES = {
    "neg": lambda a, da: -da, "add": lambda a, da, b, db: da + db, "shift": lambda a, da, k: da,
    "mul": lambda a, da, b, db: da * b + a * db, "times": lambda a, da, k: da * k, "sin": lambda a, da: np.cos(a) * da,
    "tanh": lambda a, da: (1 - np.tanh(a) ** 2) * da, "sum": lambda a, da: np.sum(da),
    "matvec": lambda a, da, W: W @ da,
}


def dual(rules):
    """A class of values with tangents that follow these rules."""
    class Dual:
        __array_ufunc__ = None

        def __init__(self, value, tangent):
            self.value, self.tangent = value, tangent

        def one(self, name, value, *more):
            return Dual(value, rules[name](self.value, self.tangent, *more))

        def __add__(self, other):
            if isinstance(other, Dual):
                return self.one("add", self.value + other.value, other.value, other.tangent)
            return self.one("shift", self.value + other, other)

        def __mul__(self, other):
            if isinstance(other, Dual):
                return self.one("mul", self.value * other.value, other.value, other.tangent)
            return self.one("times", self.value * other, other)

        def __rmatmul__(self, W):
            return self.one("matvec", W @ self.value, W)

        def __neg__(self):
            return self.one("neg", -self.value)

        def __sub__(self, other):
            return self + -other

        def __rsub__(self, other):
            return -self + other

        def sin(self):
            return self.one("sin", np.sin(self.value))

        def tanh(self):
            return self.one("tanh", np.tanh(self.value))

        def sum(self):
            return self.one("sum", np.sum(self.value))

        __radd__, __rmul__ = __add__, __mul__
    return Dual


# ---------------------------------------------------------------- 04.2

def with_rules(**wrong):
    """What programs give that were written by RULES but for these."""
    def outputs(case):
        Dual, found = dual(RULES | wrong), {}
        for text in case["texts"]:
            names = {n: Dual(x, v) for n, x, v in zip("xys", case["xs"], case["tangents"], strict=True)}
            out = eval(text, {}, names | case["constants"])
            found[text] = out.tangent if isinstance(out, Dual) else np.zeros(np.shape(out))
        return {"value": linearized(case)["value"], "tangent": found, "later": found}
    return outputs


def linearized(case):
    pairs = {text: push(text, case, case["tangents"]) for text in case["texts"]}
    tangents = {text: tangent for text, (_, tangent) in pairs.items()}
    return {"value": {text: y for text, (y, _) in pairs.items()}, "tangent": tangents, "later": tangents}


# ---------------------------------------------------------------- 04.4

def cotangents_of(text, case, u):
    """Jᵀu, a list of arrays, from the Jacobian written out."""
    return [(np.ravel(u) @ J).reshape(x.shape) for J, x in zip(jacobian(text, case), case["xs"], strict=True)]


def value_at(text, case):
    return push(text, case, [np.zeros_like(x) for x in case["xs"]])[0]


def gradients(case, u_of=lambda u: u, numbers=1.0):
    """Right outputs, or those with other cotangents in the place of u."""
    def parts(text, u):
        return cotangents_of(text, case, u)
    return {
        "value": {text: value_at(text, case) for text in case["vectors"]},
        "pulled": {text: parts(text, u_of(us[0])) for text, us in case["vectors"].items()},
        "again": {text: parts(text, u_of(us[1])) for text, us in case["vectors"].items()},
        "late": {text: parts(text, u_of(us[0])) for text, us in case["vectors"].items()},
        "gradient": {text: parts(text, numbers) for text in case["numbers"]},
        "refused": "ValueError",
    }


def value_of(case):
    """The cotangent of each number is the number itself."""
    right = gradients(case)
    right["gradient"] = {text: cotangents_of(text, case, value_at(text, case)) for text in case["numbers"]}
    return right


def stale(case):
    right = gradients(case)
    return right | {"again": right["pulled"]}
