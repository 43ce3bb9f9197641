"""Graphs that the answers are tried with, and functions that are captured: each for a trap."""

import math

import numpy as np

from exercises.frame import when

from .drive import evaluate


class Real:
    """An array with the methods that a Symbol has."""

    __array_ufunc__ = None

    def __init__(self, x):
        self.x = x

    def __getattr__(self, name):
        return getattr(self.x, name)


def _binary(function, swapped=False):
    def method(self, other):
        pair = self.x, other.x if isinstance(other, Real) else other
        return Real(function(*(pair[::-1] if swapped else pair)))
    return method


for _name, _function in {"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide,
                         "matmul": np.matmul}.items():
    setattr(Real, f"__{_name}__", _binary(_function))
    setattr(Real, f"__r{_name}__", _binary(_function, swapped=True))
Real.__gt__, Real.__lt__ = _binary(np.greater), _binary(np.less)
Real.__neg__ = lambda self: Real(-self.x)
Real.T = property(lambda self: Real(self.x.T))
for _function in (np.exp, np.tanh, np.sqrt):
    setattr(Real, _function.__name__, lambda self, f=_function: Real(f(self.x)))
for _function in (np.sum, np.max):
    setattr(Real, _function.__name__, lambda self, axis, f=_function: Real(f(self.x, axis=axis, keepdims=True)))


def called(source, arrays):
    """What the f of a text gives on arrays, as a list."""
    names = {"math": math, "np": np}
    exec(source, names)
    results = names["f"](*(Real(x) for x in arrays))
    return [result.x for result in (results if isinstance(results, tuple) else (results,))]


# name: (the body of f, its arguments' shapes, how many ops it is, what it asks for and of which op's result)
FUNCTIONS = {
    "affine": ("x, w, b: x @ w + b", [(4, 3), (3, 5), (5,)], 2, []),
    "reflected": ("x: (3 - x, 2 / x, 1.5 * x, 4 + x, x - 3, x / 2)", [(3, 4)], 6, []),
    "softmax": ("x: (lambda e: e / e.sum(1))((x - x.max(1)).exp())", [(3, 5)], 5, []),
    "column sums": ("x: x / x.sum(0) + x.max(-1) - x.sum(-2)", [(3, 5)], 6, []),
    "by shape": ("x, w: x * w if x.shape[1] > 4 and len(w.shape) == 1 else x @ w", [(3, 5), (5,)], 1, []),
    "by shape, otherwise": ("x, w: x * w if x.shape[1] > 4 and len(w.shape) == 1 else x @ w", [(3, 2), (2, 6)], 1, []),
    "used twice": ("x: (lambda g: g(g(g(g(g(g(x)))))))(lambda a: a * a + a.tanh())", [(3, 2)], 18, []),
    "unused argument": ("x, y, z: z - x", [(2, 3), (2, 3), (2, 3)], 1, []),
    "an argument as output": ("x, y: (y, x.tanh(), y)", [(2, 3), (4,)], 1, []),
    "outer": ("x, y: (x * y, y - x, x / 2 + y * y)", [(4, 1), (3,)], 5, []),
    "no rows": ("x, y: ((x * y).sum(0), y - x.exp())", [(0, 3), (1, 3)], 4, []),
    "three axes": ("x: x.sum(2) + x.max(-2) - x.sum(0)", [(2, 3, 4)], 5, []),
    "broadcast": ("x, y, s: (x + y) * s - s * y", [(4, 1, 3), (5, 1), ()], 4, []),
    "transposed": ("x: x.T @ x - x.T.T @ x.T / 7", [(3, 3)], 8, []),
    "transposed, not square": ("x, y: (x.T @ y).exp().sqrt()", [(4, 3), (4, 2)], 4, []),
    "mask": ("x, y: (x > y, (x < 0.5) * x, -x)", [(3, 4), (4,)], 4, []),
    "a mask counted": ("x, y: ((x > y) * 2, (x > y).sum(1))", [(3, 4), (4,)], 4, []),
    "a loop": ("x, w: [x := (x @ w).tanh() + k for k in range(3)][-1]", [(2, 3), (3, 3)], 9, []),
    "a number of math": ("x: x * math.sqrt(x.shape[0]) - math.pi", [(4, 3)], 2, []),
    "if": ("x: x if (x > 0).sum(0) else -x", [(1, 1)], 2, ["bool", "sum"]),
    "float": ("x: x * float(x.max(1))", [(1, 4)], 0, ["float", "max"]),
    "int": ("x: x * int(x.exp())", [()], 0, ["int", "exp"]),
    "item": ("x: x / (x * x).sum(0).item()", [(6,)], 0, ["item", "sum"]),
    "index": ("x: [x, x.tanh()][x]", [()], 0, ["index", "argument"]),
    "array": ("x: x * np.asarray(-x)", [(2, 2)], 0, ["array", "neg"]),
    "equal": ("x: x if x / 2 == 0 else -x", [()], 0, ["equal", "div"]),
    "shapes that don't fit": ("x, w: x @ w", [(4, 3), (5, 3)], 0, ["ValueError", ""]),
    "inner sizes that broadcast": ("x, w: x @ w", [(4, 3), (1, 3)], 0, ["ValueError", ""]),
    "rows that don't fit": ("x, y: x + y", [(4, 3), (4,)], 0, ["ValueError", ""]),
}
CAUGHT = """def f(x):
    try:
        s = float(x.sum(1))
    except Exception:
        s = 1.0
    try:
        s = s + x.exp().item()
    except Exception:
        s = s + 1.0
    return x * s
"""
CAUGHT_ONCE = """def f(x):
    try:
        s = float(x.sum(1))
    except Exception:
        s = None
"""
AGAIN = CAUGHT_ONCE + """    if x.exp() > 1.0:
        return x
    return x.exp()
"""
FAILED = CAUGHT_ONCE + """    if s is None:
        raise ValueError("x has no sum")
    return x * s
"""
CAUGHT_SAID = [
    when("f has caught a Break and gone on, until it asked for another value, or failed without the first: the first "
         "Break is to be raised. Look on the tape for breaks however f ends, by an exception too",
         lambda case, got: case["function"].startswith("caught, ") and got["due"][0] != "nothing"),
    when("f was caught asking for a value, and went on: it has a try … except around it, as functions do. The graph "
         "holds what it made of the exception. Look on the tape for breaks when f has ended",
         lambda case, got: case["function"].startswith("caught, ") or (
             case["function"] == "caught" and got["due"][0] == "nothing")),
    when("f has asked for several values, and caught the Breaks; the first of them is to be raised, not the last",
         lambda case, got: case["function"].startswith("caught, ") or (
             case["function"] == "caught" and got["due"] == ["item", "exp"])),
]


def function_cases(rng):
    """A case per function; some of them in float32, or in both."""
    found = []
    for name, (body, shapes, ops, due) in FUNCTIONS.items():
        arguments, _, expression = body.partition(": ")
        source = f"def f({arguments}):\n    return {expression}\n"
        found.append([name, source, shapes, ["float64"] * len(shapes), ops, due])
    for name, source in (("caught", CAUGHT), ("caught, and asked again", AGAIN), ("caught, and failed", FAILED)):
        found.append([name, source, [(1, 3)], ["float64"], 0, ["float", "sum"]])
    for name in ("reflected", "softmax", "mask", "affine", "a number of math"):
        found.append([f"{name}, float32", *next(case[1:] for case in found if case[0] == name)])
        found[-1][3] = ["float32"] * len(found[-1][2])
    found.append(["outer, float32 and 64", *next(case[1:] for case in found if case[0] == "outer")])
    found[-1][3] = ["float32", "float64"]
    return [{"function": name, "source": source, "shapes": [list(s) for s in shapes], "dtypes": dtypes, "ops": ops,
             "due": due, "arrays": [[np.asarray(rng.uniform(0.4, 1.6, s) * rng.choice([-1.0, 1.0], s), dtype)
                                     for s, dtype in zip(shapes, dtypes, strict=True)] for _ in range(2)]}
            for name, source, shapes, dtypes, ops, due in sorted(found, key=lambda case: bool(case[-1]))]


# ---------------------------------------------------------------- graphs in a few words

def build(text, arrays, seed=0):
    """Nodes of a text like "c = mul(a, 1.0); d = exp(c)", after arguments a, b … for the arrays."""
    nodes = [("abcdefghij"[k], "argument", [], list(x.shape), str(x.dtype)) for k, x in enumerate(arrays)]
    for line in text.replace("\n", ";").split(";"):
        if line.strip():
            name, _, call = line.strip().partition(" = ")
            op, _, inputs = call[:-1].partition("(")
            inputs = [x if x.isidentifier() and x not in ("True", "False") else eval(x)
                      for x in inputs.split(", ") if x]
            if op == "random":
                nodes.append((name, op, [], inputs, "float64"))
                continue
            made = evaluate([*nodes, (name, op, inputs, [], "")], arrays, seed)[0][name]
            nodes.append((name, op, inputs, list(made.shape), str(made.dtype)))
    return [list(node) for node in nodes]


def ops(nodes):
    """How many ops there are beside the arguments."""
    return sum(node[1] != "argument" for node in nodes)
