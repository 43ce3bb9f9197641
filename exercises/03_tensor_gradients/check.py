"""What the answers of chapter 3 are tried with, and the mistakes that are known."""

import numpy as np

from exercises.frame import Check, demand, gives, when
from exercises.frame.comparing import same

from . import formulas
from .drawing import draw_errors
from .formulas import added_in_front, argument, matmul_gradients, spread, stretched, summing, winners
from .tape import by_steps, central_difference, complex_step, run_program, with_tape


def computes(sentence, formula):
    """Signature of a mistake that gives what formula(case) gives, {output: array}, and that NumPy refuses likewise."""
    def alike(case, got):
        try:
            expected = formula(case)
        except (ValueError, IndexError) as error:      # by the same function: of another it's another mistake
            refused = str(error).split()[0]
            return all(isinstance(got[name], str) and refused in got[name]
                       for name in got if name == "result" or name.startswith("the gradient of "))
        return expected is not None and all(same(got[name], np.asarray(out), 1e-6) for name, out in expected.items())
    return when(sentence, alike)


def of_the_same_dtype(*names):
    return demand("right, but float64 comes out where float32 went in: the gradients of a float32 network need twice "
                  "the memory from here on. A new array takes its dtype from the gradient",
                  lambda case, got: all(np.asarray(got[name]).dtype == case["gradient"].dtype for name in names))


def whole(rng, shape):
    """Small whole numbers in float32, whose sums and products are exact."""
    return rng.integers(1, 9, shape).astype(np.float32)


# ---------------------------------------------------------------- 03.1

# Shape after broadcasting, shape before.
BROADCASTS = [((3, 3), (3, 1)), ((3, 3), (1, 3)), ((3, 3), (3,)), ((3, 3), (1,)), ((2, 3, 4), (3, 1)),
              ((2, 3, 4), (4,)), ((2, 3, 4), (2, 1, 4)), ((2, 3, 4), (1, 1, 1)), ((2, 3, 4), (2, 3, 4)), ((3, 2), ()),
              ((), ()), ((5, 1, 4), (1, 4)), ((2, 2, 2, 2), (2, 1)), ((4, 1, 3, 2), (1, 3, 1)), ((0, 3), (1, 3)),
              ((1, 1), (1,)), ((2, 3, 2, 3), (3,)), ((2, 1, 3, 2, 2, 3), (3, 1, 1, 3)), ((2, 0, 3), (0, 1))]


def shape_of(case):
    return argument(case, "shape")


def result(formula):
    """formula(gradient, shape) as a function of the case."""
    return lambda case: {"result": formula(case["gradient"], shape_of(case))}


class Unbroadcast(Check):
    exercise = "03.1"
    signatures = [
        computes("a number, shape (), was broadcast to the whole array: its gradient is the sum of all elements, but "
                 "it is passed on as it is", result(formulas.scalars_forgotten)),
        computes("extent 0: (1, 3) is broadcast to (0, 3) as well, and no copies add up to 0. Ask whether the array "
                 "had extent 1, not whether the gradient has more", result(formulas.more_than_1)),
        *[computes("axis=None sums over all axes; an empty tuple of axes sums over none, and needs no exception",
                   result(formula)) for formula in (formulas.none_is_all, formulas.no_stretched_is_all)],
        computes("nothing is summed over the axes that had extent 1: (3, 1) was stretched to (3, 3), so each element "
                 "was used 3 times", result(added_in_front)),
        computes("the axes that broadcasting added in front are still there: the array had fewer axes, and each of its "
                 "elements was copied along the new ones",
                 result(lambda g, shape: g.sum(axis=stretched(shape, g.ndim - len(shape)), keepdims=True))),
        computes("only one axis is summed in front: broadcasting may add several", result(formulas.one_in_front)),
        computes("keepdims is lost: an axis of extent 1 is an axis, and must be there after the sum",
                 result(lambda g, shape: added_in_front(g, shape).sum(axis=stretched(shape)))),
        computes("summed over the wrong axes: NumPy adds new axes in front, on the left, and here the last ones are "
                 "summed",
                 result(formulas.kept_from_behind)),
        computes("wrong axes: the places of extent 1 are counted in the shape without the axes in front. Sum the axes "
                 "in front first, or add their number",
                 result(lambda g, shape: added_in_front(g.sum(axis=stretched(shape), keepdims=True), shape))),
        computes("the copies' gradients are averaged, not summed: a number that is used 3 times moves the result 3 "
                 "times as much", result(formulas.mean)),
        computes("over the axes in front the copies' gradients are averaged: like those of an axis that was stretched, "
                 "they are summed", result(formulas.mean_in_front)),
        computes("over the axes that had extent 1 the copies' gradients are averaged: like those along axes in front, "
                 "they are summed", result(formulas.mean_of_stretched)),
        computes("the gradient of the first copy is taken, and the others are lost: they must be summed",
                 result(formulas.first_copy)),
        computes("the gradient comes back as it went in: nothing is summed", result(lambda g, shape: g)),
    ]
    demands = [of_the_same_dtype("result")]

    def cases(self, rng, ranks):
        return [{"gradient": draw(after), "shape": str(before)}
                for draw in (rng.standard_normal, lambda shape: whole(rng, shape)) for after, before in BROADCASTS]

    def truth(self, case):
        shape, g = shape_of(case), case["gradient"]
        found = np.zeros(shape)
        for index in np.ndindex(g.shape):       # every copy adds to the element that it is a copy of
            own = index[g.ndim - len(shape):]
            found[tuple(i if extent > 1 else 0 for i, extent in zip(own, shape, strict=True))] += g[index]
        return {"result": found}


# ---------------------------------------------------------------- 03.2

OPERANDS = [((3, 3), (3, 3)), ((2, 3), (3, 4)), ((5, 2, 3), (5, 3, 4)), ((2, 2, 2), (2, 2, 2)), ((5, 2, 3), (3, 4)),
            ((2, 3), (5, 3, 4)), ((4, 1, 2, 3), (5, 3, 2)), ((1, 2, 3), (6, 3, 4)), ((1, 3), (3, 1)), ((3,), (3,)),
            ((2, 3), (3,)), ((3,), (3, 4)), ((5, 2, 3), (3,)), ((3,), (5, 3, 4)), ((2, 5, 2, 3), (3,)), ((1,), (1, 4)),
            ((3,), (2, 5, 3, 4)), ((6, 2, 3), (1, 3, 4)), ((2, 1), (1,)), ((1, 2, 3), (2, 5, 3, 4)),
            ((2, 5, 2, 3), (1, 3, 4)), ((2, 3), (2, 5, 3, 4)), ((3,), (3, 3)), ((3, 3), (3,)), ((0, 3), (3, 4))]


def with_a_vector(case):
    return case["x"].ndim == 1 or case["y"].ndim == 1


class MatmulBackward(Check):
    exercise = "03.2"
    signatures = [
        when("with matrices and batches it is right, with a vector it isn't: on the left of @ a vector is a row, on "
             "the right a column, and the axis that it lent is missing from the gradient. Put it back before you "
             "multiply: a row's stood last but one, a column's last. Batches are summed as those of matrices",
             lambda case, got: with_a_vector(case)),
        *[computes("the other operand isn't transposed: of x it is gradient · yᵀ, of y it is xᵀ · gradient. With "
                   "square matrices the shapes fit either way, and the numbers don't", formula)
          for formula in (formulas.not_transposed, matmul_gradients(of_x=lambda g, column: g @ column),
                          matmul_gradients(of_y=lambda row, g: row @ g))],
        computes("the order of the factors is turned: of x it is gradient · yᵀ, of y it is xᵀ · gradient. Matrices "
                 "don't commute", formulas.left_for_right),
        computes("the gradient of y comes out transposed: it is xᵀ · gradient, not gradientᵀ · x",
                 matmul_gradients(of_y=lambda row, g: formulas.swapped(g) @ row)),
        computes("the gradients of x and y are exchanged: the first must be of the shape of x",
                 matmul_gradients(exchanged=True)),
        computes("multiplied element by element: that is the rule of *, not of @", formulas.elementwise),
        computes("the gradient that comes in is ignored, as if it were all ones", matmul_gradients(upstream=False)),
        computes("batches: .T turns all axes round, of a batch (5, 2, 3) it makes (3, 2, 5). Only the last two axes "
                 "are to be exchanged", matmul_gradients(transposed=lambda a: a.T)),
        computes("not reduced over broadcast batches: where one matrix met 5, its gradient is the sum over the 5",
                 matmul_gradients(reduce=lambda g, _, final: g.reshape(final) if g.size == np.prod(final) else g)),
    ]
    demands = [of_the_same_dtype("the gradient of x", "the gradient of y")]

    def cases(self, rng, ranks):
        return [{"gradient": draw((np.zeros(x) @ np.zeros(y)).shape), "x": draw(x), "y": draw(y)}
                for draw in (rng.standard_normal, lambda shape: whole(rng, shape)) for x, y in OPERANDS]

    def truth(self, case):
        """x @ y is linear in x: its derivative by one element is the product with a 1 there and 0 elsewhere."""
        g, x, y = (case[name].astype(float) for name in ("gradient", "x", "y"))
        of_x, of_y = np.zeros(x.shape), np.zeros(y.shape)
        for operand, found, product in ((x, of_x, lambda unit: unit @ y), (y, of_y, lambda unit: x @ unit)):
            for index in np.ndindex(operand.shape):
                unit = np.zeros(operand.shape)
                unit[index] = 1.0
                found[index] = (g * product(unit)).sum()
        return formulas.named(of_x, of_y)


# ---------------------------------------------------------------- 03.3

TRANSPOSES = [((3, 3, 3), "(2, 0, 1)"), ((2, 3, 4), "(1, 2, 0)"), ((2, 3, 4), "(0, 2, 1)"), ((2, 3, 4), "None"),
              ((2, 3, 4, 5), "(-1, 0, -2, 1)"), ((3, 3, 3), "(-2, -1, 0)"), ((4,), "(0,)")]
SUMS = [((3, 3), "1", "False"), ((3, 3), "0", "False"), ((2, 3, 4), "1", "False"), ((2, 3, 4), "None", "False"),
        ((2, 3, 4), "None", "True"), ((2, 3, 4), "(0, 2)", "False"), ((2, 3, 4), "(2, 0)", "True"),
        ((2, 3, 4), "-2", "False"), ((2, 3, 4), "(0, -1)", "False"), ((3,), "0", "False"),
        ((2, 3, 4), "(1, 0)", "False"), ((2, 3, 4), "(-2, -1)", "False")]
PICKS = [((5,), "[3, 0, 3, 3]"), ((5, 3), "np.array([1, 4, 1])"), ((5, 3), "(slice(None), [2, 2])"), ((5, 3), "2"),
         ((5, 3), "(slice(1, 4), 0)"), ((5, 3), "slice(None, None, -2)"), ((4,), "np.array([[0, 1], [1, -1]])"),
         ((4,), "[3, 1, -1]"), ((4, 3), "([0, 2, 0, -4], [1, 1, 1, 1])"),
         ((4,), "np.array([True, False, True, False])"), ((3, 3), "(0, 1)"),
         ((2, 3), "np.array([[True, False, True], [False, True, True]])"),
         ((4, 3), "(np.array([0, 2, 0]), slice(1, 3))"), ((4, 3), "(Ellipsis, None, [2, 2, 0])"),
         ((3, 2, 4), "([0, 2, 0], slice(None), [1, 3, 1])"), ((4,), "np.array([], int)")]


def rule(name, formula):
    """formula(case, its gradient) for the cases of that rule."""
    return lambda case: {"result": formula(case, case["gradient"])} if case["rule"] == name else None


def unexpanded(case, g):
    return np.broadcast_to(g, case["x"].shape)


class Rules(Check):
    exercise = "03.3"
    signatures = [
        computes("the permutation isn't inverted: with axes (2, 0, 1) the output's axis 0 was axis 2, so it must go "
                 "back to 2. Permuting by the same axes again takes it somewhere else",
                 rule("transpose", lambda case, g: g.transpose(argument(case, "axes")))),
        computes("negative axes: -1 sorts before 0, but it means the last axis. Count it from the front first",
                 rule("transpose", lambda case, g: g.transpose(np.argsort(argument(case, "axes"))))),
        computes("all axes are reversed, whatever axes says: that is right for None only",
                 rule("transpose", lambda case, g: g.transpose())),
        computes("None: np.transpose has reversed all axes, and the gradient comes back as it went in",
                 rule("transpose", lambda case, g: g if case["axes"] == "None" else None)),
        *[computes("the axes are put back one after the other, each at a place that is counted before the next one is "
                   "there: np.expand_dims takes the whole tuple", summing(formulas.one_by_one(arranged)))
          for arranged in (list, sorted)],
        computes("the axis that the sum dropped isn't put back: NumPy fits the gradient in from the right, along other "
                 "axes, or not at all", summing(unexpanded)),
        computes("the gradient is divided by the number of summed elements: that is the rule of a mean. A sum grows by "
                 "as much as each of its elements",
                 summing(lambda case, g: spread(case, g) * g.size / case["x"].size)),
        computes("the gradient that comes in is ignored: every element of the input gets 1",
                 summing(lambda case, g: np.ones(case["x"].shape))),
        computes("the gradient of the sum has still the shape of the output: each element of the input needs one",
                 rule("sum", lambda case, g: g)),
        computes("ties: elements that share a maximum get the whole gradient each, so that more comes out than went "
                 "in. Divide it among them", rule("max", lambda case, g: spread(case, g) * winners(case))),
        computes("ties: each gets half of the gradient, but three or more may share a maximum: count them",
                 rule("max", lambda case, g: spread(case, g) * np.maximum(formulas.shares(winners(case), case), 0.5)
                      * winners(case))),
        computes("ties: elements that share a maximum aren't counted along the axis but in the whole array",
                 rule("max", lambda case, g: spread(case, g) * winners(case) / winners(case).sum())),
        computes("ties: the first maximum gets the whole gradient, and those that share it get nothing (argmax knows "
                 "only one)", rule("max", lambda case, g: spread(case, g) * formulas.first_winner(case))),
        computes("ties: the elements that are close to the maximum are counted as equal to it (np.isclose). They "
                 "haven't moved the result", rule("max", lambda case, g: spread(case, g) * formulas.shares(
                     np.isclose(case["x"], case["x"].max(axis=argument(case, "axis"), keepdims=True)), case))),
        computes("max: the largest magnitude is looked for, but −3 is less than −1",
                 rule("max", lambda case, g: spread(case, g) * formulas.shares(winners(case, abs(case["x"])), case))),
        computes("max: without keepdims=True the maxima are compared with x along other axes, or not at all",
                 rule("max", formulas.maxima_unexpanded)),
        computes("max: x.max() without an axis is the largest of all, which most rows or columns don't hold: each "
                 "has a maximum of its own, along the axis", rule("max", formulas.maxima_of_all)),
        computes("max: every element gets the gradient, but only the largest one has moved the result",
                 rule("max", spread)),
        computes("places that come several times in the index keep only the last gradient: out[index] = … writes over, "
                 "and out[index] += … reads all places before it writes any. np.add.at adds one after the other",
                 rule("getitem", formulas.written)),
        computes("the gradient is read at the index, but it must be written there: what was picked from place 3 goes "
                 "back to place 3", rule("getitem", lambda case, g: g[argument(case, "index")])),
    ]
    demands = [of_the_same_dtype("result")]

    def cases(self, rng, ranks):
        found = []
        for draw in (rng.standard_normal, lambda shape: whole(rng, shape)):
            for shape, axes in TRANSPOSES:
                x = draw(shape)
                found.append({"rule": "transpose", "axes": axes, "x": x,
                              "gradient": draw(x.transpose(eval(axes)).shape)})
            for name in ("sum", "max"):
                for shape, axis, keepdims in SUMS:
                    x = draw(shape)
                    if name == "max":      # with ties; all below 0; and some that lie close together, and are no ties
                        places = (rng.integers(3, size=shape) if x.dtype == float else
                                  rng.permutation(x.size).reshape(shape) // 2)       # halves are exact in float32
                        x = (-1 - places).astype(x.dtype) * (2.0 ** -60 if keepdims == "True" else 1)
                    how = {"axis": eval(axis), "keepdims": keepdims == "True"}
                    found.append({"rule": name, "axis": axis, "keepdims": keepdims, "x": x,
                                  "gradient": 6 * draw(np.shape(x.sum(**how)))})
            for shape, index in PICKS:
                case = {"rule": "getitem", "index": index, "x": draw(shape)}
                found.append(case | {"gradient": draw(np.shape(case["x"][argument(case, "index")]))})
        x = rng.integers(-3, 0, (4, 3)).astype(float)       # and a gradient whose dtype isn't that of x
        found.append({"rule": "max", "axis": "1", "keepdims": "False", "x": x, "gradient": 6 * whole(rng, 4)})
        return found

    def truth(self, case):
        """By place: every element of the output says from which elements of the input it came."""
        x, g = case["x"], case["gradient"].astype(float)
        places = np.arange(x.size).reshape(x.shape)
        if case["rule"] == "transpose":
            places = places.transpose(argument(case, "axes"))
        elif case["rule"] == "getitem":
            places = places[argument(case, "index")]
        else:
            return {"result": self.reduction(case, g)}
        return {"result": np.bincount(np.ravel(places), np.ravel(g), x.size).reshape(x.shape)}

    def reduction(self, case, g):
        x, axis = case["x"], argument(case, "axis")
        axes = tuple(range(x.ndim)) if axis is None else tuple(np.atleast_1d(axis) % x.ndim)
        g = g.reshape([1 if i in axes else extent for i, extent in enumerate(x.shape)])
        found = np.zeros(x.shape)
        for index in np.ndindex(x.shape):
            line = tuple(slice(None) if i in axes else at for i, at in enumerate(index))
            weight = 1.0 if case["rule"] == "sum" else (x[index] == x[line].max()) / (x[line] == x[line].max()).sum()
            found[index] = weight * g[tuple(0 if i in axes else at for i, at in enumerate(index))]
        return found


# ---------------------------------------------------------------- 03.4

# Programs, with the shapes of their leaves. The first ones have one trap each, the last is a network with a loss.
PROGRAMS = {
    "x * y": {"x": (3, 3), "y": (3, 1)},
    "y * x": {"x": (3, 3), "y": (3, 1)},
    "tanh(x) + y": {"x": (3, 4), "y": (4,)},
    "x + y": {"x": (2, 3), "y": (2, 3)},       # both are handed the same array
    "x @ y": {"x": (2, 3, 4), "y": (4, 2)},
    "total(x, 0) * y": {"x": (4, 3), "y": (3,)},
    "total(x, (0, -1), True) + y": {"x": (2, 3, 4), "y": (3, 1)},
    "turn(x, (2, 0, 1)) * y": {"x": (2, 3, 4), "y": (4, 1, 3)},
    "x[[2, 0, 2]] * y": {"x": (3, 4), "y": (3, 4)},
    "x * x + x": {"x": (3, 2)},
    "x + y + x": {"x": (3,), "y": (3,)},
    "x": {"x": (2, 3)},
    "x * x + y": {"x": (2, 3), "y": (3,)},
    "long(x, y)": {"x": (2,), "y": (2,)},
    "(x * y)[3:]": {"x": (3, 2), "y": (2,)},
    "(lambda h: h * tanh(tanh(h) * x) + h)(x * y)": {"x": (3, 2), "y": (2,)},
    "(lambda h: tanh(h) * x + (h + y) * h)(x + y)": {"x": (3, 2), "y": (2,)},
    "(lambda h: (h * y, h * x)[1])(x + y)": {"x": (3, 2), "y": (2,)},
    "total((tanh(total(x, 0, True)) + x * y)[[1, 0, 1]] @ turn(w), 0) * b":
        {"x": (16, 3), "y": (3,), "w": (4, 3), "b": (4,)},
    "total((tanh(x @ turn(w1) + b1) @ turn(w2) + b2)[np.arange(6), [0, 2, 1, 1, 0, 2]])":
        {"x": (6, 4), "w1": (5, 4), "b1": (5,), "w2": (3, 5), "b2": (3,)},
}
UNUSED, ALL_IN_FLOAT32, NETWORK = list(PROGRAMS)[-3:]
IN_FLOAT32 = ("x * x + y", ALL_IN_FLOAT32)      # whole numbers, and the tanh of large ones is 1: all is exact


class Tensor(Check):
    exercise = "03.4"
    signatures = [
        when("a sum of gradients is written into an array that others hold, too: gradients[parent] += part changes the "
             "gradient that was handed in, or another Tensor's. Add as a + b",
             lambda case, got: any(case[name] is not None and not np.array_equal(case[name], got[name])
                                   for name in ("gradient", "second"))),
        gives("a Tensor that is used twice keeps only the last gradient that it was handed: what comes along its "
              "several ways must be added", with_tape(assigned=True)),
        when("a Tensor waits for all that was made from it, also for what the result doesn't come from, and that has "
             "no gradient to hand over: count what order(self) finds, and nothing else", lambda case, got:
             case["program"] == UNUSED and None in got["once"].values()),
        gives("the gradient that backward is given is ignored, as if it were all ones", with_tape(upstream=True)),
        gives("a Tensor hands its gradient on before all have handed over to it: follow order(self) backwards, where "
              "each stands behind everything that was made from it", with_tape(breadth=True)),
        gives("a Tensor that is both operands, as in x * x, is handed one of the two parts only: a dict of the parents "
              "holds it once. Walk parents and parts side by side", with_tape(merged=True)),
        gives("calls don't add up: after the second one .grad holds what that one found, and not the sum of both",
              with_tape(replaced=True)),
        gives("calls don't add up: the second one doubles .grad, which is right only if it was handed the same "
              "gradient as the first. Add what it found", with_tape(doubled=True)),
        gives("Tensors in the middle keep their gradients from call to call, and hand them on once more: the second "
              "call on one graph adds too much. Collect in a dict that each call begins anew", with_tape(stale=True)),
        gives("the gradient of x * y by x is g · y: here each operand's gradient has its own value as the factor",
              with_tape(crossed=True)),
        gives("in * the broadcasting isn't undone: the gradient has the shape of the product, not of the operand",
              with_tape(unfitted=True)),
        gives("in @ the two gradients are exchanged", with_tape(exchanged=True)),
        gives("the derivative of tanh is 1 - tanh(x)²: the result is squared, not x", with_tape(**{"tanh of x": True})),
        gives("tanh lacks the chain rule: its derivative must be multiplied by the gradient that comes in",
              with_tape(**{"no chain": True})),
    ]
    demands = [
        demand("right, but the gradients share memory: with each other, with the data, or with the array that backward "
               "was given. Who writes into one changes the other. A leaf's .grad is an array of its own: copy it",
               lambda case, got: not got["shared"]),
        demand("right, but float64 comes out where float32 went in: the gradients of a float32 network need twice the "
               "memory. A new array, ones or zeros, takes its dtype from the data",
               lambda case, got: all(got["once"][name].dtype == leaf.dtype for name, leaf in case["leaves"].items())),
        demand("right, but Tensors that are no leaves have a .grad too: only leaves keep theirs. What the others "
               "collect is needed until it is handed on, and a network has many more of them",
               lambda case, got: not got["kept"]),
        demand("right, but a Tensor hands on once for each way that leads to it: k diamonds one after the other have "
               "2ᵏ ways. Collect first all that it is handed, and hand on once", lambda case, got: not got["by ways"]),
    ]

    def cases(self, rng, ranks):
        return [{"program": program, "gradient": rng.standard_normal(self.shape(program, leaves))
                 if program not in (NETWORK, *IN_FLOAT32) else None,
                 "second": (whole if program in IN_FLOAT32 else np.random.Generator.standard_normal)(
                     rng, self.shape(program, leaves)),
                 "leaves": {name: whole(rng, shape) if program in IN_FLOAT32 else rng.standard_normal(shape)
                            for name, shape in leaves.items()}}
                for program, leaves in PROGRAMS.items()]

    def shape(self, program, leaves):
        return np.shape(run_program({"program": program}, {name: np.ones(shape) for name, shape in leaves.items()}))

    def truth(self, case):
        grads = by_steps(case, complex_step)
        more = by_steps(case, complex_step, "second")
        return {"value": run_program(case, case["leaves"]), "once": grads,
                "twice": {name: grad + more[name] for name, grad in grads.items()}}

    def picture(self, runs, path):
        case, got = runs[1][-1]
        return draw_errors({name: got["once"][name] for name in ("w1", "w2")}, by_steps(case, central_difference), path)
