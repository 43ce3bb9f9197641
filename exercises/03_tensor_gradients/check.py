"""What the answers of chapter 3 are tried with, and the mistakes that are known."""

import ast

import numpy as np

from exercises.frame import Check, demand, gives, when
from exercises.frame.judge import same


def computes(sentence, formula):
    """Signature of a mistake that gives what formula(case) gives, {output: array}, and that NumPy refuses likewise."""
    def alike(case, got):
        try:
            expected = formula(case)
        except (ValueError, IndexError):
            return all(isinstance(got[name], str) for name in got if name == "result" or name.startswith("of "))
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
              ((), ()), ((5, 1, 4), (1, 4)), ((2, 2, 2, 2), (2, 1)), ((4, 1, 3, 2), (1, 3, 1)), ((0, 3), (1, 3))]


def shape_of(case):
    return ast.literal_eval(case["shape"])


def result(formula):
    """formula(gradient, shape) as a function of the case."""
    return lambda case: {"result": formula(case["gradient"], shape_of(case))}


def stretched(shape, lead=0):
    return tuple(i + lead for i, extent in enumerate(shape) if extent == 1)


def added_in_front(g, shape):
    return g.sum(axis=tuple(range(g.ndim - len(shape))))


def kept_from_behind(g, shape):
    g = g.sum(axis=tuple(range(len(shape), g.ndim)))
    return g.sum(axis=stretched(shape), keepdims=True)


def one_in_front(g, shape):
    g = g.sum(axis=0) if g.ndim > len(shape) else g
    return g.sum(axis=tuple(i + g.ndim - len(shape) for i in stretched(shape)), keepdims=True)


def mean(g, shape):
    total = undo(g, shape)
    with np.errstate(invalid="ignore"):
        return total / np.float64(g.size / total.size)


def first_copy(g, shape):
    for _ in range(g.ndim - len(shape)):
        g = g[0]
    return g[tuple(slice(0, 1) if extent == 1 else slice(None) for extent in shape)]


def scalars_forgotten(g, shape):
    return added_in_front(g, shape).sum(axis=stretched(shape), keepdims=True) if shape else g


class Unbroadcast(Check):
    exercise = "03.1"
    signatures = [
        computes("a number, shape (), was broadcast to the whole array: its gradient is the sum of all elements, but "
                 "it is passed on as it is", result(scalars_forgotten)),
        computes("nothing is summed over the axes that had extent 1: (3, 1) was stretched to (3, 3), so each element "
                 "was used 3 times", result(added_in_front)),
        computes("the axes that broadcasting added in front are still there: the array had fewer axes, and each of its "
                 "elements was copied along the new ones",
                 result(lambda g, shape: g.sum(axis=stretched(shape, g.ndim - len(shape)), keepdims=True))),
        computes("only one axis is summed in front: broadcasting may add several", result(one_in_front)),
        computes("keepdims is lost: an axis of extent 1 is an axis, and must be there after the sum",
                 result(lambda g, shape: added_in_front(g, shape).sum(axis=stretched(shape)))),
        computes("summed over the wrong axes: NumPy adds new axes in front, on the left, and here the last ones are "
                 "summed",
                 result(kept_from_behind)),
        computes("wrong axes: the places of extent 1 are counted in the shape without the axes in front. Sum the axes "
                 "in front first, or add their number",
                 result(lambda g, shape: added_in_front(g.sum(axis=stretched(shape), keepdims=True), shape))),
        computes("the copies' gradients are averaged, not summed: a number that is used 3 times moves the result 3 "
                 "times as much", result(mean)),
        computes("the gradient of the first copy is taken, and the others are lost: they must be summed",
                 result(first_copy)),
        computes("the gradient comes back as it went in: nothing is summed", result(lambda g, shape: g)),
    ]
    demands = [of_the_same_dtype("result")]

    def cases(self, rng, ranks):
        return [{"gradient": rng.standard_normal(after), "shape": str(before)} for after, before in BROADCASTS] + [
            {"gradient": whole(rng, (2, 3, 4)), "shape": "(3, 1)"}]

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
            ((2, 3), (3,)), ((3,), (3, 4)), ((5, 2, 3), (3,)), ((3,), (5, 3, 4)), ((2, 5, 2, 3), (3,)), ((1,), (1, 4))]


def undo(g, shape, final=None):
    """Reduced to the shape of a matrix, then to that of the vector that it was."""
    out = added_in_front(g, shape).sum(axis=stretched(shape), keepdims=True)
    return out if final is None else out.reshape(final)


def swapped(a):
    return a.swapaxes(-1, -2)


def matmul_gradients(transposed=swapped, reduce=undo, exchanged=False, upstream=True):
    """The rule, and what it gives with a mistake in it."""
    def outputs(case):
        g, x, y = case["gradient"], case["x"], case["y"]
        g = g if upstream else np.ones_like(g)
        row, column = x[None, :] if x.ndim == 1 else x, y[:, None] if y.ndim == 1 else y
        g = g[..., None] if y.ndim == 1 else g
        g = g[..., None, :] if x.ndim == 1 else g
        of_x, of_y = (reduce(g @ transposed(column), row.shape, x.shape),
                      reduce(transposed(row) @ g, column.shape, y.shape))
        return {"of x": of_y, "of y": of_x} if exchanged else {"of x": of_x, "of y": of_y}
    return outputs


def not_transposed(case):
    g, x, y = case["gradient"], case["x"], case["y"]
    return {"of x": undo(g @ y, x.shape), "of y": undo(x @ g, y.shape)}


def left_for_right(case):
    """The factors in the order of the scalar rule: other · gradient on both sides."""
    g, x, y = case["gradient"], case["x"], case["y"]
    return {"of x": undo(swapped(y) @ g, x.shape), "of y": undo(g @ swapped(x), y.shape)}


def elementwise(case):
    g, x, y = case["gradient"], case["x"], case["y"]
    return {"of x": undo(g * y, x.shape), "of y": undo(g * x, y.shape)}


def with_a_vector(case):
    return case["x"].ndim == 1 or case["y"].ndim == 1


class MatmulBackward(Check):
    exercise = "03.2"
    signatures = [
        when("with matrices and batches it is right, with a vector it isn't: on the left of @ a vector is a row, on "
             "the right a column, and the axis that it lent is missing from the gradient. Put it back before you "
             "multiply: a row's stood last but one, a column's last", lambda case, got: with_a_vector(case)),
        computes("the other operand isn't transposed: of x it is gradient · yᵀ, of y it is xᵀ · gradient. With square "
                 "matrices the shapes fit either way, and the numbers don't", not_transposed),
        computes("the order of the factors is turned: of x it is gradient · yᵀ, of y it is xᵀ · gradient. Matrices "
                 "don't commute", left_for_right),
        computes("the gradients of x and y are exchanged: the first must be of the shape of x",
                 matmul_gradients(exchanged=True)),
        computes("multiplied element by element: that is the rule of *, not of @", elementwise),
        computes("the gradient that comes in is ignored, as if it were all ones", matmul_gradients(upstream=False)),
        computes("batches: .T turns all axes round, of a batch (5, 2, 3) it makes (3, 2, 5). Only the last two axes "
                 "are to be exchanged", matmul_gradients(transposed=lambda a: a.T)),
        computes("not reduced over broadcast batches: where one matrix met 5, its gradient is the sum over the 5",
                 matmul_gradients(reduce=lambda g, _, final: g.reshape(final) if g.size == np.prod(final) else g)),
    ]
    demands = [of_the_same_dtype("of x", "of y")]

    def cases(self, rng, ranks):
        found = []
        for draw in [rng.standard_normal] * len(OPERANDS) + [lambda shape: whole(rng, shape)]:
            x, y = (draw(shape) for shape in OPERANDS[len(found) % len(OPERANDS)])
            found.append({"gradient": draw(np.shape(x @ y)), "x": x, "y": y})
        return found

    def truth(self, case):
        """x @ y is linear in x: its derivative by one element is the product with a 1 there and 0 elsewhere."""
        g, x, y = (case[name].astype(float) for name in ("gradient", "x", "y"))
        of_x, of_y = np.zeros(x.shape), np.zeros(y.shape)
        for operand, found, product in ((x, of_x, lambda unit: unit @ y), (y, of_y, lambda unit: x @ unit)):
            for index in np.ndindex(operand.shape):
                unit = np.zeros(operand.shape)
                unit[index] = 1.0
                found[index] = (g * product(unit)).sum()
        return {"of x": of_x, "of y": of_y}


# ---------------------------------------------------------------- 03.3

TRANSPOSES = [((3, 3, 3), "(2, 0, 1)"), ((2, 3, 4), "(1, 2, 0)"), ((2, 3, 4), "(0, 2, 1)"), ((2, 3, 4), "None"),
              ((2, 3, 4, 5), "(-1, 0, -2, 1)"), ((3, 3, 3), "(-2, -1, 0)"), ((4,), "(0,)")]
SUMS = [((3, 3), "1", "False"), ((3, 3), "0", "False"), ((2, 3, 4), "1", "False"), ((2, 3, 4), "None", "False"),
        ((2, 3, 4), "None", "True"), ((2, 3, 4), "(0, 2)", "False"), ((2, 3, 4), "(2, 0)", "True"),
        ((2, 3, 4), "-2", "False"), ((2, 3, 4), "(0, -1)", "False"), ((3,), "0", "False")]
PICKS = [((5,), "[3, 0, 3, 3]"), ((5, 3), "np.array([1, 4, 1])"), ((5, 3), "(slice(None), [2, 2])"), ((5, 3), "2"),
         ((5, 3), "(slice(1, 4), 0)"), ((5, 3), "slice(None, None, -2)"), ((4,), "np.array([[0, 1], [1, -1]])"),
         ((4, 3), "([0, 2, 0, -4], [1, 1, 1, 1])"), ((4,), "np.array([True, False, True, False])"), ((3, 3), "(0, 1)")]


def argument(case, name):
    return eval(case[name], {"np": np})


def rule(name, formula):
    """formula(case, its gradient) for the cases of that rule."""
    return lambda case: {"result": formula(case, case["gradient"])} if case["rule"] == name else None


def reduced(case):
    return {"axis": argument(case, "axis"), "keepdims": argument(case, "keepdims")}


def spread(case, g):
    """The gradient of a reduction, copied to all elements."""
    how = reduced(case)
    if how["axis"] is not None and not how["keepdims"]:
        g = np.expand_dims(g, how["axis"])
    return np.broadcast_to(g, case["x"].shape)


def winners(case):
    return case["x"] == case["x"].max(axis=argument(case, "axis"), keepdims=True)


def first_winner(case):
    """A mask of one maximum each: the first in the order of the axes."""
    x, axis = case["x"], argument(case, "axis")
    axes = tuple(range(x.ndim)) if axis is None else tuple(np.atleast_1d(axis) % x.ndim)
    mask, seen = np.zeros(x.shape, bool), set()
    for index in np.ndindex(x.shape):
        line = tuple(i for k, i in enumerate(index) if k not in axes)
        if winners(case)[index] and line not in seen:
            seen.add(line)
            mask[index] = True
    return mask


def written(case, g):
    out = np.zeros(case["x"].shape)
    index = argument(case, "index")
    out[index] = g
    return out


def unexpanded(case, g):
    return np.broadcast_to(g, case["x"].shape)


def summing(formula):
    """A mistake in the sum's rule, and in that of max where it is built upon it."""
    def outputs(case):
        if case["rule"] not in ("sum", "max"):
            return None
        found = formula(case, case["gradient"])
        if case["rule"] == "max":
            mask = winners(case)
            found = found * mask / mask.sum(axis=argument(case, "axis"), keepdims=True)
        return {"result": found}
    return outputs


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
        computes("ties: elements that share a maximum aren't counted along the axis but in the whole array",
                 rule("max", lambda case, g: spread(case, g) * winners(case) / winners(case).sum())),
        computes("ties: the first maximum gets the whole gradient, and those that share it get nothing (argmax knows "
                 "only one)", rule("max", lambda case, g: spread(case, g) * first_winner(case))),
        computes("max: every element gets the gradient, but only the largest one has moved the result",
                 rule("max", spread)),
        computes("places that come several times in the index keep only the last gradient: out[index] = … writes over, "
                 "and out[index] += … reads all places before it writes any. np.add.at adds one after the other",
                 rule("getitem", written)),
        computes("the gradient is read at the index, but it must be written there: what was picked from place 3 goes "
                 "back to place 3", rule("getitem", lambda case, g: g[argument(case, "index")])),
    ]
    demands = [of_the_same_dtype("result")]

    def cases(self, rng, ranks):
        found = []
        for draw, many in ((rng.standard_normal, None), (lambda shape: whole(rng, shape), 1)):
            for shape, axes in TRANSPOSES[:many]:
                x = draw(shape)
                found.append({"rule": "transpose", "axes": axes, "x": x,
                              "gradient": draw(x.transpose(ast.literal_eval(axes)).shape)})
            for name in ("sum", "max"):
                for shape, axis, keepdims in SUMS[:many]:
                    x = draw(shape) if name == "sum" else rng.integers(0, 3, shape).astype(draw((1,)).dtype)
                    how = {"axis": ast.literal_eval(axis), "keepdims": keepdims == "True"}
                    found.append({"rule": name, "axis": axis, "keepdims": keepdims, "x": x,
                                  "gradient": 6 * draw(np.shape(x.sum(**how)))})
            for shape, index in PICKS[:many]:
                case = {"rule": "getitem", "index": index, "x": draw(shape)}
                found.append(case | {"gradient": draw(np.shape(case["x"][argument(case, "index")]))})
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
    "tanh(x) + y": {"x": (3, 4), "y": (4,)},
    "x @ y": {"x": (2, 3, 4), "y": (4, 2)},
    "total(x, 0) * y": {"x": (4, 3), "y": (3,)},
    "total(x, (0, -1), True) + y": {"x": (2, 3, 4), "y": (3, 1)},
    "turn(x, (2, 0, 1)) * y": {"x": (2, 3, 4), "y": (4, 1, 3)},
    "x[[2, 0, 2]] * y": {"x": (3, 4), "y": (3, 4)},
    "x * x + x": {"x": (3, 2)},
    "x + y + x": {"x": (3,), "y": (3,)},
    "long(x, y)": {"x": (2,), "y": (2,)},
    "(lambda h: h * tanh(tanh(h) * x) + h)(x * y)": {"x": (3, 2), "y": (2,)},
    "(lambda h: tanh(h) * x + (h + y) * h)(x + y)": {"x": (3, 2), "y": (2,)},
    "total((tanh(x @ turn(w1) + b1) @ turn(w2) + b2)[np.arange(6), [0, 2, 1, 1, 0, 2]])":
        {"x": (6, 4), "w1": (5, 4), "b1": (5,), "w2": (3, 5), "b2": (3,)},
}
NETWORK = list(PROGRAMS)[-1]
def run_program(case, leaves):
    """The value of a case's program by NumPy; the leaves may be complex."""
    names = {"tanh": np.tanh, "np": np, "turn": np.transpose, "long": lambda x, y: x + 3000 * y,
             "total": lambda x, axis=None, keepdims=False: np.sum(x, axis, keepdims=keepdims)}
    return eval(case["program"], names | leaves)


def upstream_of(case, value):
    return np.ones(np.shape(value)) if case["gradient"] is None else case["gradient"]


def by_steps(case, derivative):
    """Gradients of Σ gradient · value. derivative(f) of a function of a step, for each element of each leaf."""
    found = {}
    for name, array in case["leaves"].items():
        found[name] = np.zeros(array.shape)
        for index in np.ndindex(array.shape):
            unit = np.zeros(array.shape)
            unit[index] = 1.0
            slope = derivative(lambda h, name=name, array=array, unit=unit: run_program(
                case, case["leaves"] | {name: array + h * unit}))
            found[name][index] = (upstream_of(case, slope) * slope).sum()
    return found


def complex_step(f):
    """To all digits, as in chapter 2."""
    return np.imag(f(1e-30j)) / 1e-30


def central_difference(f, h=1e-5):
    """To some ten digits, and without a trick."""
    return (np.real(f(h)) - np.real(f(-h))) / (2 * h)


# A tape like the learner's, in which one thing may be wrong.

class Node:
    def __init__(self, data, how, parents=(), pull=None):
        self.data, self.how, self.parents, self.pull, self.kept = np.asarray(data), how, parents, pull, None

    def made(self, data, others, pull):
        return Node(data, self.how, (self, *others), pull)

    def __add__(self, other):
        return self.made(self.data + other.data, (other,), lambda g: (fit(g, self), fit(g, other)))

    def __mul__(self, other):
        of_self, of_other = (self, other) if self.how.get("crossed") else (other, self)
        fitted = (lambda g, node: g) if self.how.get("unfitted") else fit
        return self.made(self.data * other.data, (other,), lambda g: (fitted(g * of_self.data, self),
                                                                      fitted(g * of_other.data, other)))

    def __matmul__(self, other):
        def pull(g):
            of = matmul_gradients()({"gradient": g, "x": self.data, "y": other.data})
            return (of["of y"], of["of x"]) if self.how.get("exchanged") else (of["of x"], of["of y"])
        return self.made(self.data @ other.data, (other,), pull)

    def __getitem__(self, index):
        def pull(g):
            out = np.zeros(self.data.shape)
            np.add.at(out, index, g)
            return (out,)
        return self.made(self.data[index], (), pull)

    def tanh(self):
        out = np.tanh(self.data)
        slope = 1 - (self.data if self.how.get("tanh of x") else out) ** 2
        return self.made(out, (), lambda g: (slope if self.how.get("no chain") else g * slope,))

    def sum(self, axis=None, keepdims=False):
        how = {"axis": repr(axis), "keepdims": repr(keepdims), "x": self.data}
        return self.made(self.data.sum(axis=axis, keepdims=keepdims), (), lambda g: (spread(how, g),))

    def transpose(self, axes=None):
        back = axes and tuple(np.argsort(axes))
        return self.made(self.data.transpose(axes), (), lambda g: (g.transpose(back),))


def fit(g, node):
    return g if g.shape == node.data.shape else undo(g, node.data.shape)


def depth_first(root):
    """Parents before what was made from them."""
    found, stack = {}, [root]
    while stack:
        node = stack[-1]
        missing = [parent for parent in node.parents if parent not in found]
        stack += missing
        if not missing:
            found[stack.pop()] = True
    return list(found)


def breadth_first(root):
    """Nearest to the root last, whoever else waits for it."""
    found = {root: True}
    for node in (queue := [root]):
        new = [parent for parent in node.parents if parent not in found]
        found |= dict.fromkeys(new, True)
        queue += dict.fromkeys(new)
    return list(found)[::-1]


def with_tape(**how):
    """What a tape gives that works like this; {} is right."""
    def outputs(case):
        leaves = {name: Node(array, how) for name, array in case["leaves"].items()}
        names = {"tanh": Node.tanh, "total": Node.sum, "turn": Node.transpose, "np": np, "long": long_chain}
        root = eval(case["program"], names | leaves)
        gradient = np.array(upstream_of(case, root.data))
        grads, found = {}, {"value": root.data}
        for name in ("once", "twice"):
            if how.get("replaced"):
                grads = {}
            try:
                walk(root, np.ones_like(gradient) if how.get("upstream") else gradient, how, grads)
            except ValueError:
                return None
            found[name] = {leaf: np.array(grads[node]) if node in grads else None for leaf, node in leaves.items()}
        return found
    return outputs


def walk(root, gradient, how, grads):
    gradients = {root: gradient}
    for node in reversed(breadth_first(root) if how.get("breadth") else depth_first(root)):
        if node not in gradients:
            continue
        g = gradients.pop(node)
        if how.get("stale"):
            g = node.kept = g if node.kept is None or node is root else node.kept + g
        if node.pull is None:
            grads[node] = g if how.get("stale") or node not in grads else grads[node] + g
            continue
        for parent, part in zip(node.parents, node.pull(g), strict=True):
            if parent not in gradients or how.get("assigned"):
                gradients[parent] = part
            elif how.get("in place"):
                gradients[parent] += part
            else:
                gradients[parent] = gradients[parent] + part


def long_chain(x, y):
    for _ in range(3000):
        x = x + y
    return x


class Tensor(Check):
    exercise = "03.4"
    signatures = [
        when("a sum of gradients is written into an array that others hold, too: gradients[parent] += part changes the "
             "gradient that was handed in, or another Tensor's. Add as a + b",
             lambda case, got: case["gradient"] is not None and not np.array_equal(case["gradient"], got["gradient"])),
        gives("a Tensor that is used twice keeps only the last gradient that it was handed: what comes along its "
              "several ways must be added", with_tape(assigned=True)),
        gives("the gradient that backward is given is ignored, as if it were all ones", with_tape(upstream=True)),
        gives("a Tensor hands its gradient on before all have handed over to it: follow order(self) backwards, where "
              "each stands behind everything that was made from it", with_tape(breadth=True)),
        gives("calls don't add up: after the second one .grad holds what that one found, and not the sum of both",
              with_tape(replaced=True)),
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
    ]

    def cases(self, rng, ranks):
        return [{"program": program, "gradient": rng.standard_normal(self.shape(program, leaves))
                 if program != NETWORK else None,
                 "leaves": {name: rng.standard_normal(shape) for name, shape in leaves.items()}}
                for program, leaves in PROGRAMS.items()]

    def shape(self, program, leaves):
        return np.shape(run_program({"program": program}, {name: np.ones(shape) for name, shape in leaves.items()}))

    def truth(self, case):
        grads = by_steps(case, complex_step)
        return {"value": run_program(case, case["leaves"]), "once": grads,
                "twice": {name: 2 * grad for name, grad in grads.items()}}

    def picture(self, runs, path):
        case, got = runs[1][-1]
        return draw_errors({name: got["once"][name] for name in ("w1", "w2")}, by_steps(case, central_difference), path)


def draw_errors(found, differences, path):
    """Per parameter: the learner's gradient, the central difference, and how far they are apart."""
    from exercises.frame.pictures import canvas, save
    figure, axes = canvas(len(found), 3, size=(9.2, 4.8))
    worst = max(float(np.abs(grad - differences[name]).max()) for name, grad in found.items())
    for line, (name, grad) in zip(axes, found.items(), strict=True):
        largest, apart = np.abs(grad).max(), np.abs(grad - differences[name])
        for panel, shown in zip(line, (grad, differences[name], np.log10(apart + 1e-16)), strict=True):
            error = panel is line[2]
            limits = {"vmin": -16, "vmax": 0, "cmap": "magma"} if error else {
                "vmin": -largest, "vmax": largest, "cmap": "RdBu_r"}
            image = panel.imshow(shown, **limits)
            panel.set_xticks([])
            panel.set_yticks([])
            panel.spines[:].set_visible(False)
        figure.colorbar(image, ax=line[2], ticks=[-16, -8, 0], format="1e%d")
        line[0].set_ylabel(f"{name} {grad.shape[0]} × {grad.shape[1]}")
    for panel, title in zip(axes[0], ("your gradient", "central difference", "|distance|"), strict=True):
        panel.set_title(title)
    save(figure, path)
    return (f"a network's gradients against central differences: at most {worst:.0e} apart, and that is the "
            "differences' own error")
