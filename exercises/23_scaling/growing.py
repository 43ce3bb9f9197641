"""23.1 by µP's table 3, and what known mistakes would give."""

import numpy as np

from exercises.frame import demand, gives, when

LAYERS = "input", "hidden", "output"
INPUTS, OUTPUTS, BASE = 16, 4, 32
WIDTHS = [32, 64, 128, 256, 512]
FLAT = 0.3       # powers of the width that are taken for none: a wrong factor makes one of 1/2 at least


# ---------------------------------------------------------------- cases

def net(widths, inputs=INPUTS, outputs=OUTPUTS):
    """{name: shape} of a net of three layers."""
    sides = [inputs, *widths, outputs]
    return {f"{name}.{kind}": shape for i, name in enumerate(LAYERS)
            for kind, shape in (("weight", sides[i:i + 2]), ("bias", sides[i + 1:i + 2]))}


def stds(shapes):
    return {name: shape[0] ** -0.5 if len(shape) == 2 else 0.2 for name, shape in shapes.items()}


def block(dim, hidden, rows, outputs):
    """Other names, sides that grow by different factors, and a matrix and a vector that don't."""
    return {"head.bias": [outputs], "down": [hidden, dim], "embed": [rows, dim], "norm": [dim], "up": [dim, hidden],
            "head": [dim, outputs], "up.bias": [hidden], "table": [rows, outputs]}


def shuffled(rng, shapes):
    names = list(shapes)
    rng.shuffle(names)
    return {name: shapes[name] for name in names}


def cases(rng):
    rows, outputs = int(rng.integers(5, 12)), int(rng.integers(2, 5))
    dim, hidden = int(rng.integers(6, 10)), int(rng.integers(11, 20))
    narrow = block(dim, hidden, rows, outputs)
    grown = [block(4 * dim, 9 * hidden, rows, outputs), block(3 * dim, 2 * hidden, rows, outputs),
             block(dim, 5 * hidden, rows, outputs), block(dim + 1, hidden + 2, rows, outputs),
             block(61, 61, rows, outputs), narrow]
    found = [{"what": "multipliers", "shapes": shuffled(rng, wide), "base": shuffled(rng, narrow)} for wide in grown]
    found += [{"what": "multipliers", "shapes": net(widths), "base": net((8, 12))} for widths in ((32, 12), (8, 36))]
    # Names that say something else than the shapes: a hidden matrix, an output-like and an input-like one.
    found.append({"what": "multipliers", "base": {"input.weight": [8, 12], "hidden.weight": [12, 3], "output.weight": [
        5, 8]}, "shapes": {"input.weight": [32, 24], "hidden.weight": [24, 3], "output.weight": [5, 32]}})
    for widths in ((40, 24), (8, 12)):
        found.append(trained(rng, net(widths, 5, 3), net((8, 12), 5, 3)))
    for count in (2, 5):
        widths = np.sort(rng.choice(np.arange(8, 600), count, replace=False)).astype(float)
        found.append({"what": "growth", "widths": widths,
                      "sizes": widths ** rng.uniform(-1, 1) * np.exp(rng.normal(1, 0.3, count))})
    return [*found, {"what": "check", "widths": WIDTHS, "base": net((BASE, BASE)), "lr": 0.003, "samples": 8,
                     "steps": 3, "seed": int(rng.integers(1 << 31))}]


def trained(rng, shapes, base, steps=3):
    sides = base["input.weight"][0], base["output.weight"][1]
    return {"what": "changes", "normal": {name: rng.standard_normal(shape) for name, shape in shapes.items()},
            "std": stds(base), "base": base, "lr": float(rng.uniform(0.01, 0.03)),
            "x": [rng.standard_normal((6, sides[0])) for _ in range(steps)],
            "y": [rng.standard_normal((6, sides[1])) for _ in range(steps)]}


# ---------------------------------------------------------------- rightly, and with mistakes

def right(a, b, matrix, **_):
    """Factors of (first values, learning rate, output), all at the values and the rate: table 3."""
    if not matrix or a == 1:
        return 1.0, 1.0, 1.0
    return (1 / np.sqrt(a) if b != 1 else 1 / a), 1 / a, 1.0


def constant(a, b, matrix, **_):
    """The same, with the last layer's at its output: table 8."""
    return (1.0, 1.0, 1 / a) if matrix and a != 1 and b == 1 else right(a, b, matrix)


def factors(shapes, base, rule):
    found = {}
    for place, (name, shape) in enumerate(shapes.items()):
        grown = [wide / narrow for wide, narrow in zip(shape, base[name], strict=True)]
        found[name] = rule(a=grown[0], b=grown[-1], matrix=len(shape) == 2, name=name, shape=shape,
                           last=place == len(shapes) - 1, narrow=base[name])
    return found


def seen(triples):
    return {name: {"init · output": init * output, "lr · output": lr * output}
            for name, (init, lr, output) in triples.items()}


def layers(x, values, constants):
    found = []
    for name in LAYERS:
        found.append(constants[name] * (x @ values[name + ".weight"]) + values[name + ".bias"])
        x = np.tanh(found[-1])
    return found


def slopes(x, y, values, constants):
    """{name: gradient}, by the chain rule layer by layer."""
    outs, grads = layers(x, values, constants), {}
    delta = (outs[2] - y) / len(x)
    for i in (2, 1, 0):
        name, before = LAYERS[i], np.tanh(outs[i - 1]) if i else x
        grads[name + ".weight"] = constants[name] * np.einsum("si,so->io", before, delta)
        grads[name + ".bias"] = delta.sum(axis=0)
        delta = constants[name] * np.einsum("so,io->si", delta, values[name + ".weight"]) * (1 - before ** 2)
    return grads


def rms(before, after):
    return np.sqrt(np.mean(np.square(after - before)))


def train(case, rule, size=rms, first=lambda std, init: std * init, rate=lambda lr, factor: lr * factor, output=None,
          steps=None, afresh=False, probe=0, since=0, last=None):
    """The change of what each layer gives. since: how many steps had been made before its beginning."""
    triples = factors({name: values.shape for name, values in case["normal"].items()}, case["base"], rule)
    constants = {name: triples[name + ".weight"][2] if output is None else output for name in LAYERS}
    values = {name: first(case["std"][name], triples[name][0]) * normal for name, normal in case["normal"].items()}
    mean, square, before = dict.fromkeys(values, 0.0), dict.fromkeys(values, 0.0), None
    pairs = list(zip(case["x"], case["y"], strict=True))
    for step, (x, y) in enumerate(pairs[:steps], 1):
        if step == since + 1:
            before = layers(case["x"][probe], values, constants)
        grads, t = slopes(x, y, values, constants), 1 if afresh else step
        for name, grad in grads.items():
            if afresh:
                mean[name], square[name] = 0.0, 0.0
            mean[name], square[name] = 0.9 * mean[name] + 0.1 * grad, 0.99 * square[name] + 0.01 * grad ** 2
            move = (mean[name] / (1 - 0.9 ** t)) / np.sqrt(square[name] / (1 - 0.99 ** t))
            values[name] = values[name] - rate(case["lr"], triples[name][1]) * move
    return [float(size(b, a)) for b, a in zip(before, layers(case["x"][probe if last is None else last],
                                                                   values, constants), strict=True)]


def line(widths, sizes):
    """The slope of the line, by its normal equations."""
    x, y = np.log(widths), np.log(sizes)
    return ((x - x.mean()) * (y - y.mean())).sum() / np.square(x - x.mean()).sum()


def run(case, rule=right, power=line, **how):
    if case["what"] == "multipliers":
        return {"result": seen(factors(case["shapes"], case["base"], rule))}
    if case["what"] == "changes":
        return {"result": train(case, rule, **how), "changed": False}
    if case["what"] == "growth":
        return {"result": float(power(case["widths"], case["sizes"]))}
    return {}


def m(text, rule):
    """A mistake in the table, which shows in the training as well."""
    return gives("multipliers: " + text, lambda case: run(case, rule))


def hidden(init, lr, output=1.0):
    """Others for hidden matrices: factors as functions of (a, b)."""
    def rule(a, b, matrix, **more):
        if matrix and a != 1 and b != 1:
            return init(a, b), lr(a, b), output(a, b) if callable(output) else output
        return right(a, b, matrix, **more)
    return rule


def last(init, lr):
    """Others for matrices of which fan_in alone grows: init · output and lr · output as functions of a."""
    return lambda a, b, matrix, **more: (init(a), lr(a), 1.0) if matrix and a != 1 and b == 1 else right(
        a, b, matrix, **more)


def side(init, lr, vectors=False):
    """Others for matrices of which fan_out alone grows, or for vectors."""
    return lambda a, b, matrix, **more: (init(b), lr(b), 1.0) if matrix != vectors and (
        vectors or (a == 1 and b != 1)) else right(a, b, matrix, **more)


def one(_):
    return 1.0


def inverse(a, b=1):
    return 1 / a


def root(a, b=1):
    return a ** -0.5


def both(*rules):
    """The first of the rules that isn't right for a parameter."""
    def rule(**p):
        return next((found for other in rules if (found := other(**p)) != right(**p)), right(**p))
    return rule


def by_name(a, b, matrix, name, **more):
    known = {"hidden.weight": (root(a), 1 / a, 1.0), "output.weight": (1.0, 1.0, 1 / a)}
    return known.get(name, (1.0, 1.0, 1.0))


def one_by_name(a, b, matrix, name, **more):
    """Those of one kind are told by their name, the others by their shapes."""
    return (1.0, 1.0, 1.0) if name.startswith("input") else right(a, b, matrix)


def square_is_hidden(a, b, matrix, shape, **more):
    return right(a, a if matrix and shape[0] == shape[-1] else 1, matrix)


def whole(a, b, matrix, shape, narrow, **more):
    """Fan-ins divided as integers."""
    a, b = shape[0] // narrow[0], shape[-1] // narrow[-1]
    return right(a, b, matrix)


def fan_in(a, b, matrix, shape, **more):
    """As if base had a fan-in of 1."""
    return right(a if a == 1 else shape[0], b, matrix)


def wherever(a, b, matrix, **more):
    """Both of the last layer's: a constant, and the rate."""
    return (1 / a, 1 / a ** 2, 1.0) if matrix and a != 1 and b == 1 else right(a, b, matrix)


def mean_abs(before, after):
    return np.abs(after - before).mean()


def of_changes(text, rule=right, **how):
    return gives("changes: " + text, lambda case: run(case, rule, **how) if case["what"] == "changes" else None)


def of_growth(text, power):
    return gives("growth: " + text, lambda case: run(case, power=power) if case["what"] == "growth" else None)


def zeroed(case, got):
    return case["what"] == "changes" and max(got["result"]) == 0


SIGNATURES = [
    when("changes: normal aren't the arrays that they were before the call: parameters are trained in place, so make "
         "new ones", lambda case, got: case["what"] == "changes" and got["changed"]),
    of_changes("the first values are std · init of a normal array; std is left out", first=lambda std, init: init),
    of_changes("the first values are without init", first=lambda std, init: std),
    of_changes("the first values are without init", first=lambda std, init: std, rule=constant),
    of_changes("std is a standard deviation, not a variance: no root of it", first=lambda std, init: std ** 0.5 * init),
    of_changes("std · init is a standard deviation, no variance: no square of it",
               first=lambda std, init: std ** 2 * init),
    of_changes("each parameter's rate is lr · its factor", rate=lambda lr, factor: lr),
    of_changes("each parameter's rate is lr · its factor", rate=lambda lr, factor: lr, rule=constant),
    of_changes("each parameter's rate is lr · its factor: lr is left out", rate=lambda lr, factor: factor),
    of_changes("a rate is multiplied by its factor, not divided", rate=lambda lr, factor: lr / factor),
    of_changes("a rate is multiplied by its factor, not divided", rate=lambda lr, factor: lr / factor, rule=constant),
    of_changes("Adam's means begin anew at each step: one Adam for all steps", afresh=True),
    of_changes("all batches are steps: the last one is left out", steps=-1),
    of_changes("all batches are steps: only the first is one here", steps=1),
    of_changes("the change since the beginning, not that of the last step", since=2),
    of_changes("before there is any step: this is the change since the first", since=1),
    of_changes("what moves is what the layers give for the first batch", probe=-1),
    of_changes("two inputs are compared: before and after the steps it is what the layers give for the first batch",
               last=-1),
    of_changes("the mean of absolute values; asked for is the root of the mean square", size=mean_abs),
    of_changes("the mean square, without its root", size=lambda b, a: np.mean((a - b) ** 2)),
    of_changes("a norm grows by itself with the number of numbers: take the mean of the squares, not their sum",
               size=lambda b, a: np.linalg.norm(a - b)),
    of_changes("that is how large it is after the steps, not how far it has moved", size=lambda b, a: rms(0, a)),
    of_changes("the difference of two sizes: what turns without growing has moved as well", size=lambda b, a: rms(
        0, a) - rms(0, b)),
    of_changes("the change beside what was there before; asked for is the change itself", size=lambda b, a: rms(b, a)
               / rms(0, b)),
    of_changes("the mean of the changes, in which they cancel each other", size=lambda b, a: np.mean(a - b)),
    of_changes("a standard deviation takes the mean away first: all that moves together is lost", size=lambda b, a:
               np.std(a - b)),
    of_changes("the largest change; asked for is the root of the mean square", size=lambda b, a: np.abs(a - b).max()),
    when("changes: nothing has moved. layers gives new arrays, but parameters are changed in place: `before` must be "
         "worked out before the steps", zeroed),
    of_growth("the slope over the width itself: a power is a line where both axes are logarithmic", lambda w, s:
              np.polyfit(w, np.log(s), 1)[0]),
    of_growth("the slope of the sizes over the width: a power is a line where both axes are logarithmic", lambda w, s:
              np.polyfit(w, s, 1)[0]),
    of_growth("the slope of the sizes over the logarithm of the width: take that of the sizes, too", lambda w, s:
              np.polyfit(np.log(w), s, 1)[0]),
    of_growth("the axes have changed places", lambda w, s: line(s, w)),
    of_growth("this is the line's height at log(width) = 0, not its slope", lambda w, s: np.polyfit(
        np.log(w), np.log(s), 1)[1]),
    of_growth("only the first and the last: take all of them", lambda w, s: np.log(s[-1] / s[0]) / np.log(
        w[-1] / w[0])),
    of_growth("a line through 0: its height is to be found as well", lambda w, s: np.log(w) @ np.log(s) / (
        np.log(w) @ np.log(w))),
    of_growth("how many times larger, not by which power", lambda w, s: s[-1] / s[0]),
    of_growth("the mean of the slopes between neighbours; asked for is the line of least squares", lambda w, s: np.mean(
        np.diff(np.log(s)) / np.diff(np.log(w)))),
    of_growth("that is Pearson's correlation, not the slope", lambda w, s: np.corrcoef(np.log(w), np.log(s))[0, 1]),
    *(m("what a parameter is, is seen by its shapes, not by its name", rule) for rule in (by_name, one_by_name)),
    m("nothing depends on the width: that is how it is without µP", lambda **_: (1.0, 1.0, 1.0)),
    m("input and output have changed places: shapes are (fan_in, fan_out), as in x @ W. An input-like matrix has a "
      "fan_out that grows", lambda a, b, matrix, **more: right(b, a, matrix) if matrix else (1.0, 1.0, 1.0)),
    m("a hidden matrix needn't be square: it is one if both of its sides have grown", square_is_hidden),
    m("grown by 3/2 isn't grown by 1: the quotient of two widths is no integer (/ and not //)", whole),
    m("a is how many times fan_in has grown, beside base's: not fan_in itself. Else base isn't what it was", fan_in),
    m("everything the wrong way round: where fan_in grows, values and rates get smaller", lambda a, b, matrix, **more:
      right(1 / a, 1 / b, matrix)),
    m("hidden matrices' init is of a standard deviation: 1/√a. 1/a is their variance's", hidden(inverse, inverse)),
    m("hidden matrices' init stays base's: sums of a times as many independent numbers are √a times as large",
      hidden(lambda a, b: 1.0, inverse)),
    m("hidden matrices' rate is 1/√a: that is right for independent numbers. A step of Adam is in line with its input, "
      "and all n of a row add up: 1/a", hidden(root, root)),
    m("hidden matrices' rate stays base's: then a step moves what comes out by a times as much",
      hidden(root, lambda a, b: 1.0)),
    m("hidden matrices' rate is b/a: that is SGD's. Adam divides by the gradient's own size",
      hidden(root, lambda a, b: b / a)),
    m("hidden matrices go by fan_out: it is fan_in's numbers that are summed", hidden(lambda a, b: root(b),
                                                                                   lambda a, b: 1 / b)),
    m("hidden matrices go by both sides, as Glorot's first values: it is fan_in's numbers alone that are summed",
      hidden(lambda a, b: ((a + b) / 2) ** -0.5, lambda a, b: 2 / (a + b))),
    m("hidden matrices have 1/a at two places: at the rate, and at the output", hidden(root, inverse, inverse)),
    m("hidden matrices' rate has 1/a, and again 1/√a by the output: what is at the output is in both products",
      hidden(lambda a, b: 1.0, inverse, root)),
    m("hidden matrices of which both sides have grown alike are right, the others are taken for input and output: "
      "hidden is what grows at both", lambda a, b, matrix, **more: right(
          a, b, matrix) if a == b else (1.0, 1.0, 1.0) if b > a else (inverse(a), inverse(a), 1.0) if matrix else (
              1.0, 1.0, 1.0)),
    m("output matrices have neither a constant nor a smaller rate: their input is a times as many numbers, which a "
      "step moves in line", last(one, one)),
    m("output matrices are treated as hidden ones, with first values of 1/√a: they are in line with nothing at first, "
      "but later they are, so these must be 1/a", last(root, inverse)),
    m("output matrices' constant is 1/√a: that keeps the first outputs as they are, and lets steps move them by √a",
      last(root, root)),
    m("output matrices have 1/a twice at the rate: either at the output, or at init and lr", wherever),
    m("output matrices have 1/a twice, at init and at the output", last(lambda a: a ** -2, inverse)),
    m("output matrices have 1/a twice: either at the output (table 8), or at init and lr (table 3)",
      last(lambda a: a ** -2, lambda a: a ** -2)),
    m("output matrices have 1/√a at init beside 1/a at the output: the latter makes the first values small enough",
      last(lambda a: a ** -1.5, inverse)),
    m("output matrices have smaller first values, and base's rate", last(inverse, one)),
    m("output matrices have a smaller rate, and base's first values", last(one, inverse)),
    m("input matrices have a smaller rate: their fan_in doesn't grow, so nothing more is summed", side(one, inverse)),
    m("input matrices have smaller first values: their fan_in doesn't grow", side(root, one)),
    m("input matrices are treated as hidden ones, by fan_out: their fan_in doesn't grow", side(root, inverse)),
    m("input matrices have smaller first values: their fan_in doesn't grow", side(inverse, one)),
    m("all rates are 1/a, vectors' and input matrices' as well: with those nothing more is summed",
      both(side(one, inverse), side(one, inverse, True))),
    m("vectors' rates are 1/a: a bias is added, not summed over a width", side(one, inverse, True)),
    m("vectors have smaller first values: a bias is added, not summed over a width", side(root, one, True)),
    m("vectors are treated as hidden matrices: a bias is added, not summed over a width", side(root, inverse, True)),
    m("rates of vectors and input matrices are times b: that is SGD's. Adam divides by the gradient's own size",
      both(side(one, lambda b: b), side(one, lambda b: b, True))),
]


def powers(case, got):
    return ", ".join(f"{name} {power:.2f}" for name, power in zip(LAYERS, got["powers"]["by µP"], strict=True))


DEMANDS = [
    demand("at base's own widths each factor must be 1 to the bit, so that base stays what it is",
           lambda case, got: case["what"] != "multipliers" or case["shapes"] != case["base"] or got["ones"]),
    demand(lambda case, got: "all numbers are right, but what a step moves grows with the width, by the powers of "
           f"{powers(case, got)}", lambda case, got: case["what"] != "check" or all(
               abs(power) < FLAT for power in got["powers"]["by µP"])),
]
