"""What the answers of chapter 4 are tried with, and the mistakes that are known."""

import math

import numpy as np

from exercises.frame import Check, demand, gives, when

from . import drawing, programs
from .dots import BAD, GOOD, RIGHT, WRONG
from .functions import cotangents_of, gradients, linearized, stale, value_at, value_of, with_rules

# ---------------------------------------------------------------- 04.1

def ran(**wrong):
    """What a run gives in which these ops have other matrices."""
    return lambda case: {"runs": [programs.forward(case["program"], t, **wrong) for t in case["tangents"]],
                         "tangents": case["tangents"]}


def in_place(case, changing="add", operand=0):
    """The op `changing` writes its result into one of its operands."""
    results, tangents = [], []
    for given in case["tangents"]:
        values = [np.array(t) for t in given]
        for op, inputs, r in case["program"]["equations"]:
            ins = [values[i] for i in inputs]
            out = np.asarray({"neg": lambda a: -a, "add": lambda a, b: a + b, "scale": lambda a, r=r: r * a,
                              "matvec": lambda a, r=r: r @ a, "sum": np.sum,
                              "spread": lambda a, r=r: np.full(r, a), "zero": lambda r=r: np.zeros(r)}[op](*ins))
            if op == changing:
                ins[operand][...] = out
            values.append(ins[operand] if op == changing else out)
        results.append([np.array(values[v]) for v in case["program"]["outputs"]])
        tangents.append(values[:len(given)])
    return {"runs": results, "tangents": tangents}


def last_variable(data):
    return [len(programs.shapes_of(data)) - 1]


def only_last_given(case, got):
    """One array per run, and it is the last variable."""
    want = [programs.forward(case["program"], t, last_variable(case["program"])) for t in case["tangents"]]
    return all(matches(g, w) for g, w in zip(got["runs"], want, strict=True))


def each_once(case, got):
    """The outputs in the order of their numbers, each once."""
    outputs = sorted(set(case["program"]["outputs"]))
    return all(matches(g, programs.forward(case["program"], t, outputs))
               for g, t in zip(got["runs"], case["tangents"], strict=True))


def not_a_list(case, got):
    """The single output itself, where it should be a list of one."""
    return any(matches([r], programs.forward(case["program"], t))
               for r, t in zip(got["runs"], case["tangents"], strict=True))


class Program(Check):
    exercise = "04.1"
    signatures = [
        when("the program gives back its last variable: which variables are outputs, and how many, stands in "
             "self.outputs", only_last_given),
        when("the array itself is given back, where the program gives a list of its outputs, also when there is only "
             "one", not_a_list),
        when("the program gives back all its variables: the outputs are those whose numbers are in self.outputs",
             lambda case, got: all(len(r) == len(programs.shapes_of(case["program"])) for r in got["runs"])),
        when("the program gives back what each equation has made: the outputs are those whose numbers are in "
             "self.outputs, and inputs may be among them",
             lambda case, got: all(len(r) == len(case["program"]["equations"]) for r in got["runs"])),
        when("the outputs come in the order of the variables, each once: they come in the order of self.outputs, where "
             "a variable may stand twice", each_once),
        *(gives(f"add writes its sum into its {which}: but that variable, here an input, may be needed again "
                "further down", lambda case, i=i: in_place(case, operand=i))
          for i, which in enumerate(("first operand (+=)", "second operand"))),
        *(gives(f"{op} writes its result into its operand: but that variable, here an input, may be needed again "
                "further down. Make a new array", lambda case, op=op: in_place(case, op)) for op in ("neg", "scale")),
        gives("matvec multiplies from the wrong side: W @ a, not a @ W, which is Wᵀ @ a",
              ran(matvec=lambda r, a: r.T @ a if r.shape[0] == r.shape[1] else r @ a)),
        gives("neg leaves the sign", ran(neg=lambda r, a: a)),
        gives("scale doesn't multiply by its residual", ran(scale=lambda r, a: a)),
        gives("scale divides by its residual",
              ran(scale=lambda r, a: programs.MATRICES["scale"](1 / np.asarray(r), a))),
        gives("add subtracts", ran(add=lambda r, a, b: a - b)),
        gives("sum divides by the number of elements: that is the mean",
              ran(sum=lambda r, a: a.mean(0, keepdims=True))),
        gives("spread divides its number among the elements: each of them is the whole number",
              ran(spread=lambda r, a: np.repeat(a, r, axis=0) / r)),
        when("after the first run, the second is wrong: values of the run before are still there",
             lambda case, got: matches(got["runs"][0], programs.forward(case["program"], case["tangents"][0]))),
    ]

    def cases(self, rng, ranks):
        return [{"program": data, "tangents": tangents} for data, tangents, _ in programs.program_cases(rng)]

    def truth(self, case):
        return ran()(case)


def matches(got, expected):
    return len(got) == len(expected) and all(np.shape(g) == np.shape(e) and np.allclose(g, e, rtol=1e-8)
                                             for g, e in zip(got, expected, strict=True))


# ---------------------------------------------------------------- 04.2

TEXTS = ["x + y", "x + 3", "3 + x", "c + x", "-x", "x - y", "3 - x", "x * y", "x * 3", "c * x", "x * x", "x + x",
         "x.sin()", "x.tanh()", "x.tanh() * x.sin()", "W @ x", "x.sum()", "s * s.sin()", "y", "c", "W @ c",
         "(W @ (x * y).tanh()).sin()", "(x * x).sin() * y + x", "x.sum() * (y.sin() * y).sum() + s"]
AGAIN = ["(x + 3) * x", "x * 3 * x", "-x * x", "(x + y) * x"]       # what was an operand is one again


def point(rng, n, m):
    """Inputs and constants of functions."""
    x, y, s, c, W, V = (programs.number(rng, shape) for shape in (n, n, (), n, (m, n), (n, n)))
    return {"xs": [x, y, s], "constants": {"c": c, "W": W / 2, "V": V / 2}}


def says(name, text):
    """Whether some output of that name is a string with the text in it."""
    return lambda case, got: any(isinstance(out, str) and text in out for out in got[name].values())


def right_at_first(case, got):
    expected = linearized(case)["tangent"]
    return all(matches([got["tangent"][t]], [expected[t]]) for t in expected)


def nowhere(case, got):
    """The tangents are those at xs multiplied by -0.5, the numbers that the arrays hold later."""
    return right_at_first(case | {"xs": [-0.5 * x for x in case["xs"]]}, got)


class Linearize(Check):
    exercise = "04.2"
    tolerance = 1e-11
    signatures = [
        when("linearize gives two things, (y, program)", says("value", "not two things")),
        when("y is a Tracer still: the first result is its value, an array", lambda case, got: any(
            getattr(out, "kind", "") == "Tracer" for out in got["value"].values())),
        when("the second result isn't a Program", says("tangent", "no Program")),
        when("program.outputs isn't a list of one number, that of y's tangent; where y doesn't depend on xs, a zero of "
             "y's shape stands for it",
             says("tangent", "outputs")),
        when("the program changes when the caller overwrites xs: its residuals are xs' own arrays, not the numbers "
             "that they held. Work on copies", right_at_first),
        when("the program's output is its last variable, whichever that is: it is the variable of y's tangent, which f "
             "may have been given as an input, or have worked out further up",
             lambda case, got: all(matches([got["tangent"][t]], case["tangents"][2:]) for t in ("y", "x + 3"))),
        gives("of the product rule ȧ·b + a·ḃ only the first half is there: what the right factor's change does is "
              "missing", with_rules(mul=lambda a, da, b, db: da * b)),
        gives("of the product rule ȧ·b + a·ḃ only the second half is there: what the left factor's change does is "
              "missing", with_rules(mul=lambda a, da, b, db: a * db)),
        gives("the residuals of the product are crossed over: each factor's tangent is scaled by the other factor's "
              "value", with_rules(mul=lambda a, da, b, db: a * da + b * db)),
        gives("the residuals of the product are both the right factor: ȧ is scaled by b, and ḃ by a",
              with_rules(mul=lambda a, da, b, db: (da + db) * b)),
        gives("the residuals of the product are both the left factor: ȧ is scaled by b, and ḃ by a",
              with_rules(mul=lambda a, da, b, db: a * (da + db))),
        gives("the product's tangent is ȧ + ḃ: the product rule scales each by the other factor's value",
              with_rules(mul=lambda a, da, b, db: da + db)),
        gives("the product's tangent is ȧ·b − a·ḃ: the product rule is a sum",
              with_rules(mul=lambda a, da, b, db: da * b - a * db)),
        gives("a constant factor is lost: x * 3 changes three times as fast as x",
              with_rules(times=lambda a, da, k: da)),
        gives("a constant factor's residual is the value, not the constant: x * 3 changes three times as fast as x, "
              "wherever x is", with_rules(times=lambda a, da, k: da * a)),
        gives("a constant that is added scales the tangent: x + 3 changes as fast as x",
              with_rules(shift=lambda a, da, k: da * k)),
        gives("a constant that is added puts the tangent to 0: x + 3 changes as fast as x",
              with_rules(shift=lambda a, da, k: da * 0)),
        gives("a constant that is added doubles the tangent: x + 3 changes as fast as x; a constant doesn't change",
              with_rules(shift=lambda a, da, k: da * 2)),
        gives("-x has the tangent of x: its sign turns, too", with_rules(neg=lambda a, da: da)),
        gives("only the left operand's tangent counts in a sum", with_rules(add=lambda a, da, b, db: da)),
        gives("the residual of sin is sin of the value: it must be the derivative there, the cosine",
              with_rules(sin=lambda a, da: np.sin(a) * da)),
        gives("the residual of sin has the wrong sign: its derivative is +cos",
              with_rules(sin=lambda a, da: -np.cos(a) * da)),
        gives("the residual of sin is taken at the wrong point, the cosine of the result: it is the cosine of what "
              "went in", with_rules(sin=lambda a, da: np.cos(np.sin(a)) * da)),
        gives("sin passes its tangent on unchanged: it must be scaled by the cosine",
              with_rules(sin=lambda a, da: da)),
        gives("the residual of tanh is taken at the wrong point, 1 − x²: it is 1 − t² with t the result",
              with_rules(tanh=lambda a, da: (1 - a * a) * da)),
        gives("the residual of tanh is tanh of the value: it must be the derivative there, 1 − tanh²",
              with_rules(tanh=lambda a, da: np.tanh(a) * da)),
        gives("the residual of tanh is 1 − t: the square is missing",
              with_rules(tanh=lambda a, da: (1 - np.tanh(a)) * da)),
        gives("tanh passes its tangent on unchanged: it must be scaled by 1 − t²", with_rules(tanh=lambda a, da: da)),
        when("an operation changes the Tracer that it is given, and what uses that next is wrong: make a new one",
             lambda case, got: set() < {t for t, v in linearized(case)["value"].items()
                                        if not matches([got["value"][t]], [v])} <= set(AGAIN)),
        when("the program is the derivative at other numbers than f was given", nowhere),
    ]
    demands = [
        demand(lambda case, got: f"right, but f is called {max(got['calls'].values())} times: the value and the "
                                 "program come out of the same run",
               lambda case, got: set(got["calls"].values()) == {1}),
    ]

    def cases(self, rng, ranks):
        return [point(rng, n, m) | {"texts": TEXTS + AGAIN, "tangents": [rng.standard_normal(s) for s in (n, n, ())]}
                for n, m in ((4, 3), (2, 5), (3, 3))]

    def truth(self, case):
        return linearized(case)


# ---------------------------------------------------------------- 04.3

def loop(**mistake):
    """Whether the transposed program gives what the loop with this mistake gives."""
    def predicate(case, got):
        return matches(got["pulled"], programs.pulled(case["program"], case["cotangents"], **mistake))
    return predicate


def problem(text):
    """Whether a transposed program, or that one's transpose, couldn't be run, for a reason with this text."""
    return lambda case, got: any(isinstance(got[name], str) and text in got[name] for name in ("pulled", "twice"))


def inverse_matrix(r, n, ct):
    return [np.linalg.pinv(r) @ ct]


class Transpose(Check):
    exercise = "04.3"
    signatures = [
        when("transpose doesn't give a Program", problem("no Program")),
        when("an input that no output depends on has None for its cotangent: it is zero, and for that there is an op",
             problem("None")),
        when("the transposed program has not as many outputs as the program has inputs: there must be one for each, in "
             "their order, and zero for an input that no output depends on", problem("number of outputs")),
        when("the transpose is right, but the program itself was changed by it, and no longer runs as before",
             lambda case, got: loop()(case, got) and (isinstance(got["forward"], str) or not matches(
                 got["forward"], programs.forward(case["program"], case["tangents"])))),
        when("the transpose is right, but it can't be transposed itself: transposed twice, it isn't the program again",
             lambda case, got: loop()(case, got)),
        when("fan-out is lost where both operands of add are the same variable: it is used twice there, and gets the "
             "cotangent twice", loop(once=True)),
        when("fan-out is lost: where a variable is used several times, the last cotangent that arrives takes the place "
             "of those before (= for +=). Fan-out becomes addition", loop(keep="last")),
        when("fan-out is lost: where a variable is used several times, only the first cotangent that arrives is kept. "
             "Fan-out becomes addition", loop(keep="first")),
        *(when("fan-out is lost among the outputs: a variable may be several outputs, and then it begins with the sum "
               "of their cotangents", loop(seeds=kept)) for kept in ("last", "first")),
        when("only the first output's cotangent goes in: the new program has one input per output", loop(seeds="one")),
        when("an equation whose result has no cotangent ends the walk: only that one is passed over", loop(ends=True)),
        when("the order isn't reversed: from the first equation to the last, cotangents never get beyond the last "
             "one's inputs. An equation can hand on only what it was handed", loop(order=1)),
        when("add hands its cotangent to its first operand only: both changed the sum, both get it, whole",
             loop(add=lambda r, n, ct: [ct])),
        when("add divides its cotangent between its operands: each gets it whole",
             loop(add=lambda r, n, ct: [ct / 2, ct / 2])),
        when("scale isn't transposed but inverted, by 1/r: the transpose of a diagonal matrix is the matrix itself",
             loop(scale=lambda r, n, ct: [ct / r])),
        when("matvec isn't transposed but inverted: W⁻¹ undoes W, and Wᵀ is something else",
             loop(matvec=inverse_matrix)),
        when("transposed and inverted are taken for each other, in scale (1/r) and in matvec (W⁻¹): the transpose "
             "undoes nothing", loop(scale=lambda r, n, ct: [ct / r], matvec=inverse_matrix)),
        when("scale hands its cotangent on without the residual", loop(scale=lambda r, n, ct: [ct])),
        when("neg hands its cotangent on with the sign unturned: -1 transposed is -1", loop(neg=lambda r, n, ct: [ct])),
        when("the transpose of sum divides by the number of elements: every element changed the sum one to one, so "
             "each gets the cotangent whole", loop(sum=lambda r, n, ct: [np.full(n, ct / math.prod(n))])),
        when("the transpose of spread is a mean: all copies came from one number, which gets the sum of their "
             "cotangents", loop(spread=lambda r, n, ct: [np.mean(ct)])),
        when("the transpose of spread is missing: all copies came from one number, which gets the sum of their "
             "cotangents", loop(spread=lambda r, n, ct: [])),
    ]
    demands = [
        demand(lambda case, got: f"right, but the transposed program has {len(got['drawn'][1]['equations'])} "
                                 f"equations, {most(case)} would do: each equation is visited once, when its cotangent "
                                 "is complete",
               lambda case, got: len(got["drawn"][1]["equations"]) <= most(case)),
    ]

    def cases(self, rng, ranks):
        return [{"program": data, "tangents": tangents[0], "cotangents": cotangents}
                for data, tangents, cotangents in programs.program_cases(rng)]

    def truth(self, case):
        ahead = programs.forward(case["program"], case["tangents"])
        return {"forward": ahead, "pulled": programs.backward(case["program"], case["cotangents"]), "twice": ahead}

    def picture(self, runs, path):
        _, got = runs[1][0]
        return drawing.draw_both_ways(got, path)


def most(case):
    """Equations that a transposed program needs at most: two per use of a variable, and a zero for each to begin with.
    """
    data = case["program"]
    return (2 * sum(len(inputs) for _, inputs, _ in data["equations"]) + len(data["outputs"])
            + len(programs.shapes_of(data)))


# ---------------------------------------------------------------- 04.4

VECTORS = ["(W @ (x * y).tanh()).sin()", "x.sin() * y + x * 2", "c * y"]
NUMBERS = ["(x * x).sum() * s.sin()", "s", "((V @ (x * y)).tanh() * x).sum()"]     # the last one is drawn


def shorter(name):
    """An array or fewer arrays where there must be one per input."""
    return lambda case, got: any(len(got[name][text]) < len(case["xs"]) for text in got[name])


def overtaken(case, got):
    """Pullbacks are right at first, and not when others have been made."""
    expected = {text: cotangents_of(text, case, us[0]) for text, us in case["vectors"].items()}
    return (all(matches(got["pulled"][text], cts) for text, cts in expected.items())
            and any(isinstance(got["late"][text], str) or not matches(got["late"][text], cts)
                    for text, cts in expected.items()))


def tells(name):
    return lambda case, got: not got["dots"][name] < WRONG


def one_element(case, got):
    """Whether x.sin() of an array of one element is refused, or has its gradient."""
    return got["of one element"] == "ValueError" or matches(got["of one element"], [np.cos(case["xs"][0][:1])])


class Grad(Check):
    exercise = "04.4"
    tolerance = 1e-10
    signatures = [
        when("pull gives fewer arrays than there are inputs: Jᵀu is a list, one array per input", shorter("pulled")),
        when("pull gives the cotangent of the first input alone: Jᵀu is a list, one array per input",
             lambda case, got: all(matches([got["pulled"][t]], cotangents_of(t, case, us[0])[:1])
                                    for t, us in case["vectors"].items())),
        when("grad gives the gradient of the first input alone: a list, with one array per input",
             lambda case, got: all(matches([got["gradient"][t]], cotangents_of(t, case, 1.0)[:1])
                                    for t in case["numbers"])),
        when("grad takes a function that gives an array, and gives something back, as if its elements had been added "
             "up: a gradient is one of a single number, so this is a ValueError",
             lambda case, got: got["refused"] != "ValueError"),
        gives("pull begins with ones, whatever u says: Jᵀ·u is asked for",
              lambda case: gradients(case, np.ones_like)),
        gives("u isn't used after the first call: pull gives the first call's result again", stale),
        when("a pull gives something else once vjp has been called for another function: what it needs belongs to it "
             "alone, and not to a global name or an attribute of vjp", overtaken),
        gives("the gradient begins with y itself: that is y·∂y, the gradient of y²/2. The derivative of y by itself "
              "is 1",
              value_of),
        gives("the gradient has the wrong sign", lambda case: gradients(case, numbers=-1.0)),
    ]
    demands = [
        demand(lambda case, got: f"right, but f is called {max(got['calls'].values())} times: linearize once, and "
                                 "transpose once; each pull then only runs the transposed program",
               lambda case, got: set(got["calls"].values()) == {1}),
        demand(lambda case, got: f"right, but programs are run {max(got['runs'].values())} times for one gradient: one "
                                 "run of the transposed program gives all of it, however many inputs there are",
               lambda case, got: set(got["runs"].values()) == {1}),
        demand("right, but of a function that gives an array of one element, of shape (1,), grad gives neither a "
               "ValueError nor its gradient: refuse it, or take u of y's shape", one_element),
        demand("dot_test must give a float", lambda case, got: all(isinstance(d, float) for d in got["dots"].values())),
        demand("dot_test gives a negative number: of the difference, only the magnitude counts",
               lambda case, got: not any(d < 0 for d in got["dots"].values())),
        demand("dot_test gives nan where both numbers are 0: 0 divided by 0. They are equal there, so it is 0",
               lambda case, got: not np.isnan(got["dots"]["everything zero"])),
        *(demand(f"dot_test rejects a right transpose ({name})",
                 lambda case, got, name=name: abs(got["dots"][name]) < RIGHT) for name in GOOD),
        *(demand(sentence, tells(name)) for name, sentence in BAD.items()),
        demand(lambda case, got: f"dot_test gives {max(map(abs, got['dots'].values())):.3g}, more than 2: the "
                                 "difference is divided by the larger magnitude of the two",
               lambda case, got: all(d <= 2.0000001 for d in got["dots"].values())),
        demand("dot_test divides by something other than the larger magnitude: Jᵀ twice too large is off by a half",
               lambda case, got: abs(got["dots"]["2 times too large, of small numbers"] - 0.5) < 1e-6
               and abs(got["dots"]["the sign"] - 2.0) < 1e-6
               and abs(got["dots"]["all cotangents are zero"] - 1.0) < 1e-6),
        demand("dot_test draws from somewhere else than rng: with the same state of rng it must give the same number, "
               "and with another one another. Who finds an error wants to see it again",
               lambda case, got: got["drawn from rng"][0] == got["drawn from rng"][1] != got["drawn from rng"][2]),
    ]

    def cases(self, rng, ranks):
        found = []
        for n, m in ((4, 3), (2, 5)):
            case = point(rng, n, m)
            us = {text: [rng.standard_normal(value_at(text, case).shape) for _ in range(2)]
                  for text in VECTORS}
            found.append(case | {"vectors": us, "numbers": NUMBERS, "pairs": programs.pairs(rng, n, m),
                                 "seeds": rng.integers(1 << 30, size=2).tolist()})
        return found

    def truth(self, case):
        return gradients(case)

    def picture(self, runs, path):
        _, got = runs[1][0]
        return drawing.draw_both_ways(got, path)
