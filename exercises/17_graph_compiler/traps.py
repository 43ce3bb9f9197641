"""Graphs that passes and fusion are tried with. The arguments of each are a, b …; what it does stands in a text."""

import numpy as np

from .graphs import build, ops

# ---------------------------------------------------------------- 17.2

# name: (text, outputs, ops that may be left, what is said when there are more)
PASSES = {
    "a dead chain": ("p = exp(a); q = tanh(p); r = neg(b); s = add(q, q)", "r", 1,
                     "exp, tanh and add of “a dead chain” are still there: nobody needs them. From the last node to "
                     "the first, everything that is needed is known when its turn comes"),
    "outputs in the middle": ("p = exp(a); q = neg(b); r = tanh(q)", "p r q", 3, ""),
    "the same twice": ("p = exp(a); q = exp(a); r = sum(p, 1); s = sum(q, 1); t = mul(r, s)", "t s p", 3,
                       "in “the same twice” exp is done on a twice, and then the sum of each: once p stands for q, the "
                       "sums are the same too. Replace a node's inputs before looking it up"),
    "everything twice": ("; ".join(f"{x} = {op}; {y} = {op}" for x, y, op in zip(
        "klmnopqrstu", "KLMNOPQRSTU", ("transpose(a)", "matmul(b, k)", "max(a, 0)", "greater(a, b)", "tanh(b)",
                                       "sqrt(b)", "neg(b)", "add(a, b)", "sub(a, b)", "mul(a, b)", "div(a, b)"),
        strict=True)), " ".join("klmnopqrstuKLMNOPQRSTU"), 11,
        "of “everything twice” some op is still done twice: whatever op it is, of the same inputs it gives the same"),
    "two orders": ("p = sub(a, b); q = sub(b, a); r = div(p, q); s = div(q, p)", "r p s", 4, ""),
    "two axes": ("p = sum(a, 0); q = sum(a, 1); r = max(a, 1); s = add(p, q); t = mul(r, s)", "t", 5, ""),
    "two arguments": ("p = exp(a); q = exp(b); r = sub(p, q)", "r", 3, ""),
    "two draws": ("p = random(3, 4); q = random(3, 4); r = mul(p, q); s = add(r, b)", "s p", 4, ""),
    "a draw nobody needs": ("p = random(3, 4); q = random(3, 4); r = add(q, b)", "r", 3, ""),
    "checks": ("p = neg(b); q = check(p); r = exp(b); s = check(r); t = tanh(b)", "t", 5, ""),
    "two checks of the same": ("p = neg(b); q = check(p); r = check(p)", "p", 3, ""),
    "plus zero": ("p = add(a, 0); q = div(1, p); r = add(0.0, a)", "q p r", 3, ""),
    "times zero": ("p = mul(b, 0); q = mul(a, 0.0); r = sub(a, a)", "p q r", 3, ""),
    "zero and minus zero": ("p = add(a, 0.0); q = add(a, -0.0); r = div(1.0, p); s = div(1.0, q)", "r s", 4, ""),
    "1 and True": ("p = greater(a, b); q = mul(p, 1); r = mul(p, 1.0); s = mul(p, True); t = div(p, 1)", "q r s t", 4,
                   "in “1 and True” bool · True is still there: it is that bool, in its own dtype. A 1 is a 1, whether "
                   "int, float or True"),
    "an int": ("p = greater(a, b); q = mul(p, 3); r = mul(q, 1.0); s = div(q, 1); t = mul(q, 1)", "r s t", 4,
               "in “an int” the last mul is left: an int times 1 is that int"),
    "minus minus zero": ("p = sub(a, -0.0); q = div(1, p)", "q p", 2, ""),
    "a check of the same": ("p = exp(b); q = exp(b); r = check(q); s = mul(b, 1); t = check(s)", "p", 3, ""),
    "times minus one": ("p = mul(b, -1); q = div(b, -1); r = mul(-1, p)", "p q r", 3, ""),
    "times one": ("p = mul(b, 1); q = mul(1.0, p); r = div(q, 1); s = exp(r); t = exp(b); u = sub(s, t)", "u r", 2,
                  "in “times one” more than exp and one sub are left: b · 1, 1.0 · b and b / 1 are b, and exp of them "
                  "is exp of b. So first leave out what changes nothing, then look for what is the same"),
    "one over": ("p = div(1, b); q = sub(1, b); r = sub(b, 1); s = add(b, 1)", "p q r s", 4, ""),
    "transposes": ("p = transpose(a); q = transpose(p); r = transpose(q); s = matmul(q, r)", "s r", 2,
                   "in “transposes” more is left than one transpose and the matmul: the transpose of a transpose is "
                   "what it was made of, and the third one in a row is the first"),
    "minus twice": ("p = neg(a); q = neg(p); r = exp(q); s = neg(q)", "r s", 2,
                    "in “minus twice” more is left than one neg and one exp: −(−x) is x, and the third one in a row is "
                    "the first"),
    "minus twice, once": ("p = neg(b); q = neg(p); r = exp(q)", "r", 1,
                          "the first neg of “minus twice, once” is still there: where −(−x) has become x, nobody needs "
                          "−x any more. Look for what nobody needs when the other passes are through"),
    "exp twice": ("p = exp(b); q = exp(p); r = tanh(q); s = tanh(r)", "s", 4, ""),
    "minus and transposed": ("p = neg(a); q = transpose(p); r = neg(q); s = transpose(r)", "s r", 4, ""),
    "arguments as outputs": ("p = exp(b); q = mul(a, 1)", "a p q b a", 1, ""),
    "an unused argument": ("p = exp(b)", "p", 1, ""),
}
# The graphs that are wrong with a mistake, and no others; and what it is
MISTAKES = [
    ("a draw nobody needs",
     "a draw whose numbers nobody needs was left out: then all that are drawn after it are other numbers than before"),
    ("two draws, a draw nobody needs",
     "two draws have become one: each random op gives other numbers, so it is never the same as another"),
    ("two checks of the same",
     "two checks of the same value have become one: an op with an effect is never the same as another"),
    ("checks, two checks of the same, a check of the same",
     "a check was left out: nobody uses its result, but it stops the program where something isn't finite"),
    ("two draws, a draw nobody needs, two checks of the same",
     "ops with an effect were merged: two draws are two draws, and two checks two checks, although their inputs are "
     "the same"),
    ("checks, two checks of the same, a check of the same, a draw nobody needs",
     "ops with an effect were left out: that nobody needs its result makes neither a draw nor a check superfluous"),
    ("zero and minus zero",
     "0.0 and -0.0 were taken for the same: they are equal in Python, but −0.0 + 0.0 is +0.0, and −0.0 + −0.0 is −0.0. "
     "repr tells them apart"),
    ("plus zero, zero and minus zero",
     "x + 0 was taken for x: where x is −0.0 the sum is +0.0, and 1 over it +∞ instead of −∞"),
    ("times zero",
     "x · 0 was taken for 0, or x − x: where x is ∞ or nan both are nan, and where x is negative, x · 0 is −0.0"),
    ("an int", "int · 1.0 and int / 1 are float64: x · 1 is x only if it has x's dtype"),
    ("minus minus zero", "x − 0 is x, but x − −0.0 is x + 0.0, and +0.0 where x is −0.0"),
    ("1 and True, an int",
     "bool · 1, bool · 1.0 and bool · True are an int64, a float64 and a bool: neither are they the same as each "
     "other, nor are the first two x. Nor is bool / 1: a float64"),
    ("times minus one", "x · −1, or x / −1, was taken for x: that is −x"),
    ("1 and True, zero and minus zero, an int",
     "constants that are equal in Python, 1 and 1.0 and True, 0.0 and -0.0, were taken for the same: bool · 1 is an "
     "int64, bool · 1.0 a float64, and x + 0.0 isn't x + -0.0. Their types and how they are written (repr) tell them "
     "apart"),
    ("two orders, one over",
     "a − b was taken for b − a, or a / b for b / a: only add and mul may change the order of their inputs"),
    ("one over, plus zero, zero and minus zero, minus minus zero", "1 / x was taken for x / 1"),
    ("two axes, one over, zero and minus zero, 1 and True",
     "a sum over axis 0 was taken for one over axis 1, x + 0.0 for x + -0.0: the numbers among the inputs tell ops "
     "apart, too"),
    ("exp twice", "two ops that aren't inverse to themselves were cancelled: −(−x) is x, exp of exp isn't"),
    ("minus and transposed", "a neg and a transpose have cancelled each other: two of the same do"),
]


def special(rng):
    """A 3 × 4 array in which all is: both zeros, both infinities, nan, ordinary numbers. The next one is ordinary."""
    a = rng.uniform(0.5, 1.5, (3, 4)) * rng.choice([-1.0, 1.0], (3, 4))
    a.flat[rng.permutation(12)[:6]] = [-0.0, 0.0, np.inf, -np.inf, np.nan, -2.0]
    b = rng.uniform(0.5, 1.5, (3, 4)) * rng.choice([-1.0, 1.0], (3, 4))
    b.flat[:2] = [-0.75, 0.75]
    return [a, b]


def pass_cases(rng):
    """A case per graph."""
    found = []
    for name, (text, outputs, left, _) in PASSES.items():
        arrays = special(rng)
        with np.errstate(all="ignore"):
            nodes = build(text, arrays)
        found.append({"graph": name, "nodes": nodes, "outputs": outputs.split(), "arrays": arrays, "left": left,
                      "seed": int(rng.integers(1 << 30))})
    return found


# ---------------------------------------------------------------- 17.3

A, B, C, D, E, F, G = (6, 8), (1, 8), (8, 8), (6, 5), (7, 8), (8, 6), (6, 8)
# name: (text, shapes of a, b …, outputs, kernels that will do, what is said when there are more)
FUSE = {
    "softmax": ("p = max(a, 1); q = sub(a, p); r = exp(q); s = sum(r, 1); t = div(r, s)", [A], "t", 1,
                "a softmax is one loop: a row's maximum and sum are known as soon as the row has been gone through, "
                "and its elements may use them"),
    "layer norm": ("p = sum(a, 1); q = div(p, 8); r = sub(a, q); s = mul(r, r); t = sum(s, 1); u = div(t, 8); v = "
                   "add(u, 1e-5); w = sqrt(v); x = div(r, w); y = mul(x, b)", [A, B], "y q w", 1,
                   "a layer norm is one loop. Its mean and its deviation are a number per row: ops on those walk over "
                   "one column, and belong to the loop over the same rows"),
    "an op between": ("p = exp(a); q = matmul(p, b); r = add(q, p)", [A, C], "r", 3, ""),
    "two ops between": ("p = exp(a); q = matmul(p, b); r = matmul(q, b); s = add(r, p); t = tanh(s)", [A, C], "t", 4,
                        ""),
    "two loops": ("p = exp(a); q = sum(p, 1); r = tanh(b); s = mul(r, q); t = sum(r, 1); u = add(p, t)", [A, D], "s u",
                  3, ""),
    "the last one waits": ("p = exp(b); q = exp(a); r = sum(q, 1); s = mul(p, r); t = sum(s, 1); u = mul(q, t)", [A, D],
                           "s u", 3, ""),
    "column sums inside": ("p = sum(a, 0); q = sub(a, p)", [A], "q", 2, ""),
    "column maxima inside": ("p = max(a, 0); q = sub(a, p)", [A], "q", 2, ""),
    "a sum of all": ("p = sum(a, 1); q = sum(p, 0); r = div(a, q)", [A], "r", 2, ""),
    "column sums at the end": ("p = tanh(a); q = mul(p, p); r = sub(1, q); s = mul(b, r); t = sum(s, 0); u = sum(s, 1)",
                               [A, G], "s t u", 1, "a column sum belongs to the loop that makes its elements: nothing "
                                                   "in the loop uses it, so it may be ready at the end only"),
    "other widths": ("p = exp(a); q = exp(b)", [A, D], "p q", 2, ""),
    "other widths, a maximum": ("p = exp(a); q = max(b, 1)", [A, D], "p q", 2, ""),
    "a column maximum": ("p = tanh(a); q = max(p, 0)", [A], "p q", 1,
                         "“a column maximum” is one loop: a max over axis 0 walks over its operand, as a sum does"),
    "a row beside": ("p = exp(b); q = mul(a, p)", [A, B], "q", 2, ""),
    "a column first": ("p = exp(b); q = mul(a, p)", [A, (6, 1)], "q", 1,
                       "“a column first” is one loop: an op on one number per row may come before those on all of it"),
    "other heights": ("p = exp(a); q = exp(b)", [A, E], "p q", 2, ""),
    "as many elements": ("p = exp(a); q = exp(b)", [A, F], "p q", 2, ""),
    "side by side": ("p = exp(a); q = tanh(b); r = mul(p, 3)", [A, G], "p q r", 1,
                     "“side by side” is one loop: ops that walk over the same rows and columns need nothing else in "
                     "common"),
    "a check": ("p = exp(a); q = check(p); r = tanh(p)", [A], "r", 2,
                "in “a check” p and r are one kernel: the check needs p, but r doesn't need the check"),
    "a transpose": ("p = exp(a); q = transpose(p); r = tanh(q)", [(6, 6)], "r", 3, ""),
    "the first one waits": ("p = exp(a); q = tanh(b); r = sum(q, 1); s = mul(p, r)", [A, D], "s", 2, ""),
    "a mask": ("p = greater(a, b); q = mul(p, a); r = sum(q, 0)", [A, B], "p q r", 1, "“a mask” is one loop"),
    "random numbers": ("p = random(6, 8); q = mul(p, a); r = random(6, 8); s = add(q, r)", [A], "s", 3, ""),
    "MLP": ("p = matmul(a, b); q = add(p, c); r = mul(q, 0.8); s = tanh(r); t = add(s, 1); u = mul(q, t); v = mul(u, "
            "0.5); w = matmul(v, d); x = add(w, e); y = add(x, a)", [A, (8, 9), (1, 9), (9, 8), (1, 8)], "y", 4,
            "an MLP is four kernels: two matmuls, and behind each one loop for all that is done elementwise"),
    "attention": ("p = transpose(b); q = matmul(a, p); r = mul(q, 0.35); s = max(r, 1); t = sub(r, s); u = exp(t); v = "
                  "sum(u, 1); w = div(u, v); x = matmul(w, c)", [A, E, (7, 4)], "x", 4,
                  "attention is four kernels: a transpose, two matmuls, and between them one loop for the whole "
                  "softmax"),
    "an argument given back": ("p = exp(a); q = tanh(p); r = sum(q, 1)", [A], "a r p", 1,
                               "“an argument given back” is one loop"),
}


def reads_of(nodes):
    """{name: the names that it needs}."""
    return {node[0]: [x for x in node[2] if isinstance(x, str)] for node in nodes}


def complaint(kernels, nodes):
    """(kind, what about) of the first thing that forbids these kernels, or None."""
    if not isinstance(kernels, list) or not all(isinstance(kernel, list) and kernel for kernel in kernels) or not all(
            isinstance(name, str) for kernel in kernels for name in kernel):
        return "lists", ["what fused gives"]
    made, needs = {node[0]: node for node in nodes}, reads_of(nodes)
    wanted = [node[0] for node in nodes if node[1] != "argument"]
    flat = [name for kernel in kernels for name in kernel]
    if sorted(flat) != sorted(wanted):
        return "ops", sorted(set(wanted) ^ set(flat)) or sorted({name for name in flat if flat.count(name) > 1})
    for kernel in kernels:
        steps = [made[name] for name in kernel]
        if len(kernel) > 1 and any(op in ("matmul", "transpose", "random", "check") for _, op, *_ in steps):
            return "alone", kernel
        if steps[0][1] not in ("matmul", "transpose", "random", "check"):
            walks = [made[x[2][0]][3] if x[1] in ("sum", "max") else x[3] for x in steps]
            if len({w[0] for w in walks}) > 1:
                return "rows", kernel
            if len({w[1] for w in walks if w[1] > 1}) > 1:
                return "columns", kernel
        late = [x[0] for x in steps if x[1] in ("sum", "max") and x[2][1] == 0]
        if any(name in needs[x[0]] for x in steps for name in late):
            return "late", kernel
    home = {name: i for i, kernel in enumerate(kernels) for name in kernel}
    reach = np.zeros((len(kernels), len(kernels)), bool)        # [i, j]: i needs j, at whatever distance
    for name, inputs in needs.items():
        for x in inputs:
            if x in home and home[x] != home[name]:
                reach[home[name], home[x]] = True
    direct = reach.copy()
    for _ in kernels:
        reach |= reach @ reach
    waits = [i for i in range(len(kernels)) if reach[i, i]]
    if waits:
        return "cycle", kernels[waits[0]]
    if np.triu(direct).any():
        return "order", kernels[int(np.argwhere(np.triu(direct))[0][0])]
    place = {name: k for k, name in enumerate(flat)}
    inside = [name for name in flat if any(x in place and place[x] > place[name] for x in needs[name])]
    return ("inside", inside) if inside else None


def greedy(nodes):
    """A partition that is allowed: op by op into the last kernel that takes it."""
    kernels, there = [], []
    for node in nodes:
        there.append(node)
        if node[1] == "argument":
            continue
        for i in reversed(range(len(kernels))):
            trial = [k + [node[0]] * (i == j) for j, k in enumerate(kernels)]
            if (complaint(trial, there) or ("order",))[0] == "order":
                kernels = trial
                break
        else:
            kernels.append([node[0]])
    return kernels


def fuse_cases(rng):
    """A case per graph, and one of a layer to be drawn."""
    found = []
    for name, (text, shapes, outputs, most, _) in FUSE.items():
        arrays = [rng.uniform(0.5, 1.5, shape).astype(np.float64 if k == 1 else np.float32)
                  for k, shape in enumerate(shapes)]
        nodes = build(text, arrays)
        alone = [[node[0]] for node in nodes if node[1] != "argument"]
        found.append({"graph": name, "nodes": nodes, "outputs": outputs.split(), "most": most, "ops": ops(nodes),
                      "partitions": [alone, greedy(nodes)]})
    return found
