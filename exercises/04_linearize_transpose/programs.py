"""Linear programs as data, and what they give: by matrices, and by loops with a mistake in them."""

import math

import numpy as np

# op: the matrix of the result, from the matrices of its inputs
MATRICES = {
    "neg": lambda r, a: -a,
    "add": lambda r, a, b: a + b,
    "scale": lambda r, a: np.broadcast_to(np.asarray(r, float), len(a))[:, None] * a,
    "matvec": lambda r, a: r @ a,
    "sum": lambda r, a: a.sum(0, keepdims=True),
    "spread": lambda r, a: np.repeat(a, r, axis=0),
    "zero": lambda r, width: np.zeros((math.prod(r), width)),
}
TRANSPOSES = {    # op: cotangents handed to its inputs
    "neg": lambda r, n, ct: [-ct],
    "add": lambda r, n, ct: [ct, ct],
    "scale": lambda r, n, ct: [r * ct],
    "matvec": lambda r, n, ct: [r.T @ ct],
    "sum": lambda r, n, ct: [np.full(n, ct)],
    "spread": lambda r, n, ct: [np.sum(ct)],
    "zero": lambda r, n, ct: [],
}


def shapes_of(data):
    """The shapes of all variables."""
    shapes = [tuple(shape) for shape in data["shapes"]]
    for op, inputs, r in data["equations"]:
        first = shapes[inputs[0]] if inputs else ()
        shapes.append({"matvec": lambda r=r: r.shape[:1], "sum": tuple, "spread": lambda r=r: (r,),
                       "zero": lambda r=r: tuple(r)}.get(op, lambda first=first: first)())
    return shapes


def matrices(data, **wrong):
    """Per variable the matrix that makes it from all inputs laid end to end."""
    ops = MATRICES | wrong
    sizes = [math.prod(shape) for shape in data["shapes"]]
    found = np.split(np.eye(sum(sizes)), np.cumsum(sizes)[:-1])
    for op, inputs, r in data["equations"]:
        found.append(ops[op](r, *([found[i] for i in inputs] or [sum(sizes)])))
    return found


def forward(data, tangents, outputs=None, **wrong):
    """The outputs of a program, by its matrices."""
    found, shapes = matrices(data, **wrong), shapes_of(data)
    flat = np.concatenate([np.ravel(t) for t in tangents])
    return [(found[v] @ flat).reshape(shapes[v]) for v in (data["outputs"] if outputs is None else outputs)]


def backward(data, cotangents):
    """The inputs' cotangents: the transposed matrix."""
    found = matrices(data)
    flat = sum(np.ravel(u) @ found[v] for u, v in zip(cotangents, data["outputs"], strict=True))
    sizes = [math.prod(shape) for shape in data["shapes"]]
    return [part.reshape(shape) for part, shape in
            zip(np.split(flat, np.cumsum(sizes)[:-1]), data["shapes"], strict=True)]


def number(rng, shape):
    """Numbers away from 0, of either sign."""
    return rng.uniform(0.4, 1.5, shape) * rng.choice([-1.0, 1.0], shape)


def random_program(rng, n, m, length):
    """A program of 4 inputs (two vectors of n, one of m, a number), the last of which is not used, and 3 outputs."""
    shapes, equations = [(n,), (n,), (m,), ()], []
    def emit(op, inputs, residual=None):
        equations.append([op, [int(i) for i in inputs], residual])
        shapes.append(shapes_of({"shapes": shapes[:4], "equations": equations})[-1])
    while len(equations) < length:
        vectors = [v for v, shape in enumerate(shapes) if shape in ((n,), (m,))]
        numbers = [v for v, shape in enumerate(shapes) if shape == () and v != 3]
        op = str(rng.choice("neg add add add scale scale matvec matvec sum spread".split()))
        a = int(rng.choice(vectors))
        alike = [v for v, shape in enumerate(shapes) if shape == shapes[a]]
        if op == "add":
            emit("add", [a, rng.choice(alike)])
        elif op == "scale":
            emit("scale", [a], number(rng, shapes[a]))
        elif op == "matvec":
            emit("matvec", [a], number(rng, (m if shapes[a] == (n,) else n, *shapes[a])) / n)
        elif op == "spread" and numbers:
            emit("spread", [rng.choice(numbers)], n if rng.random() < 0.5 else m)
        elif op in ("neg", "sum"):
            emit(op, [a])
    last = len(shapes) - 1
    return {"shapes": shapes[:4], "equations": equations, "outputs": [last, last - 3, last]}


def program_cases(rng):
    """Programs: what grad will meet, small ones for a single trap each, and random ones."""
    n, W = 4, number(rng, (4, 4)) / 2
    network = {"shapes": [(n,), (n,)], "outputs": [10], "equations": [      # Σ x·tanh(W(x·y)), linearized
        ["scale", [0], number(rng, n)], ["scale", [1], number(rng, n)], ["add", [2, 3], None], ["matvec", [4], W],
        ["scale", [5], number(rng, n)], ["scale", [6], number(rng, n)], ["scale", [0], number(rng, n)],
        ["add", [7, 8], None], ["sum", [9], None]]}
    fan = {"shapes": [(3,)], "outputs": [4], "equations": [["scale", [0], number(rng, 3)], ["scale", [1], 2.5],
                                                           ["add", [1, 2], None], ["add", [3, 1], None]]}
    doubled = {"shapes": [()], "outputs": [8], "equations": [["add", [k, k], None] for k in range(8)]}
    through = {"shapes": [(3,), (2,), (5,)], "outputs": [1, 0, 3, 1, 5, 6, 7], "equations": [
        ["neg", [0], None], ["scale", [2], number(rng, 5)], ["zero", [], (2,)],
        ["matvec", [4], number(rng, (2, 5))], ["zero", [], ()]]}
    spread = {"shapes": [(3,), ()], "outputs": [4, 5, 6], "equations": [      # who spreads into a list adds lists
        ["sum", [0], None], ["spread", [1], 6], ["spread", [2], 5], ["scale", [3], number(rng, 6)],
        ["add", [4, 4], None]]}
    programs = [network, fan, doubled, through, spread, *(random_program(rng, n, m, 14) for n, m in ((3, 5), (4, 2)))]
    for data in programs:
        shapes = shapes_of(data)
        yield data, [[rng.standard_normal(s) for s in data["shapes"]] for _ in range(2)], \
            [rng.standard_normal(shapes[v]) for v in data["outputs"]]


def pulled(data, cotangents, keep="sum", order=-1, seeds=None, once=False, ends=False, **wrong):
    """The inputs' cotangents by the learner's loop with something wrong in it.

    keep   what becomes of cotangents that meet at a variable: their "sum", the "last" or the "first"
    order  -1: last equation first
    seeds  how the outputs' cotangents are kept where they meet; "one": only the first output has any
    ends   whether the loop ends at an equation without a cotangent
    once   whether an equation hands to a variable that it uses twice only once
    """
    rules, shapes, found = TRANSPOSES | wrong, shapes_of(data), {}
    def hand(variable, ct, keep):
        met = variable in found
        found[variable] = ct if not met or keep == "last" else found[variable] + (ct if keep == "sum" else 0)
    for variable, ct in list(zip(data["outputs"], cotangents, strict=True))[:1 if seeds == "one" else None]:
        hand(variable, ct, seeds or keep)
    first = len(data["shapes"])
    for out, (op, inputs, r) in list(enumerate(data["equations"], first))[::order]:
        if ends and out not in found:
            break
        if out in found:
            n = shapes[inputs[0]] if inputs else ()
            handed = list(zip(inputs, rules[op](r, n, found[out]), strict=False))
            for variable, ct in dict(handed).items() if once else handed:
                hand(variable, ct, keep)
    return [found.get(v, np.zeros(shapes[v])) for v in range(first)]


def pairs(rng, n, m):
    """{name: (program, what claims to be its transpose)}."""
    W, V, r, q = (number(rng, s) for s in ((m, n), (n, n), n, n))
    def vector(*equations, shapes=((n,),), outputs=None):
        first = len(shapes)
        return {"shapes": [list(s) for s in shapes], "equations": [list(e) for e in equations],
                "outputs": outputs or [first + len(equations) - 1]}
    def scaled(*residuals):
        return vector(*(["scale", [0], k] for k in residuals), outputs=[1, 2][:len(residuals)])
    two = vector(["scale", [0], r], ["scale", [1], q], ["add", [2, 3], None], shapes=((n,), (n,)))
    def two_back(*second):
        return vector(["scale", [0], r], second, outputs=[1, 2])
    wide = scaled(r, q)      # one input, two outputs
    def wide_back(k):
        return vector(["scale", [0], r], ["scale", [1], k], ["add", [2, 3], None], shapes=((n,), (n,)))
    zeros = vector(["zero", [], [m]])
    return {
        "an unsquare matrix": (vector(["matvec", [0], W]), vector(["matvec", [0], W.T], shapes=((m,),))),
        "several outputs, several inputs": (two, two_back("scale", [0], q)),
        "everything zero": (zeros, vector(["zero", [], [n]], shapes=((m,),))),
        "the same matrix, not transposed": (vector(["matvec", [0], V]), vector(["matvec", [0], V])),
        "elements in another order": (scaled(r), scaled(r[::-1].copy())),
        **{f"the {which} in another order": (vector(["matvec", [0], W]), vector(["matvec", [0], mixed], shapes=((m,),)))
           for which, mixed in (("outputs", W[::-1].T), ("inputs", W.T[::-1]))},
        "the inputs' cotangents in each other's place": (two, vector(["scale", [0], q], ["scale", [0], r],
                                                                     outputs=[1, 2])),
        "the outputs' cotangents in each other's place": (wide, vector(
            ["scale", [0], q], ["scale", [1], r], ["add", [2, 3], None], shapes=((n,), (n,)))),
        "the second input's cotangent is zero": (two, two_back("zero", [], [n])),
        "the second output is forgotten": (wide, wide_back(0.0)),
        "the sign": (scaled(r), scaled(-r)),
        "all cotangents are zero": (scaled(r), vector(["zero", [], [n]])),
        "a cotangent of nothing": (zeros, vector(["matvec", [0], W.T], shapes=((m,),))),
        "2 times too large, of small numbers": (scaled(1e-30 * r), scaled(2e-30 * r)),
    }
