"""What the answers of chapter 2 are tried with, and the mistakes that are known."""

import math

import numpy as np

from exercises.frame import Check, demand, gives, when

from .levels import TEXTS, nested, to_some_digits
from .rules import NAMES, TINY, Step, with_rules

# ---------------------------------------------------------------- 02.1

BASE_0 = ["(x - e) ** 1", "(x - e) ** 2"]
EXPRESSIONS = ["x + y", "x + 3", "3 + x", "-x", "x - y", "x - 3", "3 - x", "x * y", "x * 3", "3 * x", "x / y", "x / 3",
               "3 / x", "x ** 3", "x ** 2.5", "x ** -2", "x ** 1", "x ** 0", "n ** 3", "n ** 2", "0.7 ** x", "2 ** n",
               "x ** y", *BASE_0, "x * x", "exp(n)", "tanh(x)", "x if x < y else y", "x if x > y else y",
               "n if n < 0 else -n", "n if n > -3 else -n", "2 * x if x > e else x * e", "2 * x if x < e else x * e",
               "2 * x if e < x else e", "2 * x if e > x else e", "(x - e) * y", "y * (x - e)", "(x - e) / y",
               "exp(-x * y) / (1 + tanh(x) ** 2)"]


def raised(*texts):
    """Whether some expression has raised an exception that says one of them."""
    return lambda case, got: any(isinstance(out, str) and text in out for out in got["value"].values()
                                 for text in texts)


def operand_changed(case, got):
    return any(tuple(got["operands"][name]) != (case[name], case["d" + name]) for name in NAMES)


def numbers_move(case, got):
    """In x + 3 the 3 has the tangent 1."""
    return got["tangent"]["x + 3"] == case["dx"] + 1.0


def only_at_base_0(case, got):
    right = with_rules()(case)
    return all(np.isclose(got[name][text], value, rtol=1e-9, atol=1e-12) for name in right
               for text, value in right[name].items() if text not in BASE_0)


def rsub_unturned(case):
    outputs = with_rules()(case)
    outputs["tangent"]["3 - x"] = case["dx"]
    return outputs


class Dual(Check):
    exercise = "02.1"
    signatures = [
        when("an operator changes one of its operands, and whatever uses that next is wrong: leave self and other as "
             "they are, and make a new Dual", operand_changed),
        when("a comparison gives an object, which counts as true whatever is in it: < and > return a bool",
             lambda case, got: not got["bools"]),
        when("a number on the left fails: in 3 - x Python asks the Dual for __rsub__, and likewise for __radd__, "
             "__rmul__, __rtruediv__ and __rpow__", raised("TypeError")),
        when("a plain number as the other operand fails, as in x + 3: it has no value and tangent until it is lifted",
             raised("AttributeError")),
        when("an operator asks for itself without end: a number to the power of a Dual is __rpow__ again, so in "
             "__pow__ both operands are needed as their values", raised("RecursionError")),
        when("plain numbers get the tangent 1, as if they were what is differentiated by: a constant doesn't change, "
             "its tangent is 0", numbers_move),
        when("a power with a negative base asks for its logarithm: that is needed only where the exponent changes, and "
             "in n ** 3 it doesn't", raised("domain", "positive input")),       # the latter since Python 3.14
        when("powers are right but for those with the base 0: d(x ** 1) = 1 · x ** 0 · ẋ holds there as well, since "
             "0 ** 0 is 1. The rule needs no exception, and no division by the base", only_at_base_0),
        gives("a power with a negative base is nan: the logarithm of the base is needed only where the exponent "
              "changes; in n ** 3 it is log of a negative number, and nan times 0 is nan",
              with_rules(pow=lambda a, da, b, db, out: b * a ** (b - 1) * da + out * np.log(a) * db)),
        gives("with a number on the left the tangent is lost: 3 + x changes as fast as x + 3 does, and 3 · x as x · 3",
              with_rules(left=lambda tangent: 0.0)),
        gives("3 - x keeps the tangent of x: it falls as fast as x grows, so the sign turns", rsub_unturned),
        gives("3 - x gives x - 3: subtraction doesn't commute, so __rsub__(self, other) is other - self",
              with_rules(swapped=("sub",))),
        gives("3 / x gives x / 3: division doesn't commute, so __rtruediv__(self, other) is other / self",
              with_rules(swapped=("div",))),
        gives("2 ** x gives x ** 2: __rpow__(self, other) has other as the base", with_rules(swapped=("pow",))),
        gives("with a number on the left, -, / and ** take the operands in the wrong order: __rsub__(self, other) is "
              "other - self", with_rules(swapped=("sub", "div", "pow"))),
        gives("a - b adds the tangents: the derivative of a difference is ȧ - ḃ",
              with_rules(sub=lambda a, da, b, db, out: da + db)),
        gives("-x keeps the tangent of x: its sign turns, too", with_rules(neg=lambda a, da, out: da)),
        gives("a + b multiplies the tangents: the derivative of a sum is ȧ + ḃ",
              with_rules(add=lambda a, da, b, db, out: da * db)),
        gives("of the product rule ȧ·b + a·ḃ only the first half is there: what the right factor's change does is "
              "missing",
              with_rules(mul=lambda a, da, b, db, out: da * b)),
        gives("of the product rule ȧ·b + a·ḃ only the second half is there: what the left factor's change does is "
              "missing", with_rules(mul=lambda a, da, b, db, out: a * db)),
        gives("the product's tangent is the product of the tangents, ȧ·ḃ: that is the term ε·ε, the one that is 0. The "
              "product rule is ȧ·b + a·ḃ", with_rules(mul=lambda a, da, b, db, out: da * db)),
        gives("the product rule subtracts: it is ȧ·b + a·ḃ, the minus belongs to the quotient",
              with_rules(mul=lambda a, da, b, db, out: da * b - a * db)),
        gives("the product's tangent has a third term, ȧ·ḃ: that is the one with ε·ε, which is 0",
              with_rules(mul=lambda a, da, b, db, out: da * b + a * db + da * db)),
        gives("the product rule is halved: ȧ·b + a·ḃ is a sum over both factors, not their mean",
              with_rules(mul=lambda a, da, b, db, out: (da * b + a * db) / 2)),
        gives("the tangents are crossed over: each factor's tangent goes with the other factor's value, ȧ·b + a·ḃ",
              with_rules(mul=lambda a, da, b, db, out: a * da + b * db)),
        gives("the quotient rule has the wrong sign: it is (ȧ·b - a·ḃ)/b², the numerator's change first",
              with_rules(div=lambda a, da, b, db, out: (a * db - da * b) / b ** 2)),
        gives("the quotient rule adds: (ȧ·b + a·ḃ)/b². A growing denominator makes the quotient smaller: minus",
              with_rules(div=lambda a, da, b, db, out: (da * b + a * db) / b ** 2)),
        gives("the quotient rule divides by b where it must divide by b²",
              with_rules(div=lambda a, da, b, db, out: (da * b - a * db) / b)),
        *[gives("all of the numerator is divided, (ȧ·b - a·ḃ)/b²: the brackets are missing", with_rules(div=rule))
          for rule in (lambda a, da, b, db, out: da - out * db / b,
                       lambda a, da, b, db, out: da * b - a * db / b ** 2)],
        gives("the quotient's tangent is the quotient of the tangents, ȧ/ḃ: the rule is (ȧ·b - a·ḃ)/b²",
              with_rules(div=lambda a, da, b, db, out: np.float64(da) / db)),
        gives("in the quotient only the numerator's change counts, ȧ/b: the denominator changes, too",
              with_rules(div=lambda a, da, b, db, out: da / b)),
        gives("where the exponent changes, as in 2 ** x and x ** y, its part is missing: value · log(base) · the "
              "exponent's tangent", with_rules(pow=lambda a, da, b, db, out: b * a ** (b - 1) * da)),
        gives("in x ** y only the exponent's part is there, or only the base's: where both change, the tangent is "
              "the sum",
              with_rules(pow=lambda a, da, b, db, out: out * np.log(a) * db if db else b * a ** (b - 1) * da)),
        gives("the part of the exponent lacks the logarithm of the base: d(2 ** x) = 2 ** x · log 2 · ẋ",
              with_rules(pow=lambda a, da, b, db, out: b * a ** (b - 1) * da + out * db)),
        gives("the power rule keeps the exponent: d(x ** 3) = 3 · x ** 2 · ẋ, with one power less",
              with_rules(pow=lambda a, da, b, db, out: b * out * da + (out * np.log(a) * db if db else 0.0))),
        gives("the power rule forgets its factor: d(x ** 3) = 3 · x ** 2 · ẋ, and the 3 is missing",
              with_rules(pow=lambda a, da, b, db, out: a ** (b - 1) * da + (out * np.log(a) * db if db else 0.0))),
        gives("the power rule lacks the chain rule's factor, the tangent of the base",
              with_rules(pow=lambda a, da, b, db, out: b * a ** (b - 1) * (da != 0)
                         + (out * np.log(a) * db if db else 0.0))),
        *[gives("x ** n - 1 is the power, less 1: the exponent n - 1 needs brackets",
                with_rules(pow=lambda a, da, b, db, out, slope=slope: slope(b, out) * da
                           + (out * np.log(a) * db if db else 0.0)))
          for slope in (lambda b, out: b * out - 1, lambda b, out: b * (out - 1))],
        gives("exp keeps the tangent of x: it must be multiplied by exp(x)",
              with_rules(exp=lambda a, da, out: da)),
        gives("exp lacks the chain rule: its derivative exp(x) must be multiplied by the tangent of x",
              with_rules(exp=lambda a, da, out: out)),
        gives("exp is applied to the tangent as well: the tangent of exp(x) is exp(x)·ẋ",
              with_rules(exp=lambda a, da, out: math.exp(da))),
        gives("tanh lacks the chain rule: its derivative 1 - tanh(x)² must be multiplied by the tangent of x",
              with_rules(tanh=lambda a, da, out: 1 - out * out)),
        gives("the derivative of tanh is 1 - tanh(x)²: the result is squared, not x",
              with_rules(tanh=lambda a, da, out: (1 - a * a) * da)),
        gives("the derivative of tanh is 1 - tanh(x)²: the square is missing",
              with_rules(tanh=lambda a, da, out: (1 - out) * da)),
        gives("the derivative of tanh is 1 - tanh(x)²: minus, not plus",
              with_rules(tanh=lambda a, da, out: (1 + out * out) * da)),
        gives("< and > must compare the values alone: here tangents decide where the values are equal, and a function "
              "takes another branch than with plain numbers",
              with_rules(less=lambda a, da, b, db: (a, da) < (b, db))),
        gives("< and > compare the tangents: a branch is chosen by the values, as with plain numbers",
              with_rules(less=lambda a, da, b, db: da < db)),
        gives("> holds for equal values: x > e must be False where both have the same value",
              with_rules(greater=lambda a, b: a >= b)),
        gives("< holds for equal values: x < e must be False where both have the same value",
              with_rules(less=lambda a, da, b, db: a <= b, greater=lambda a, b: a > b)),
        gives("< and > hold for equal values: x < e must be False where both have the same value",
              with_rules(less=lambda a, da, b, db: a <= b)),
    ]

    def cases(self, rng, ranks):
        found = []
        for larger in ("x", "y"):
            x, y = rng.uniform(0.4, 0.9), rng.uniform(1.2, 1.8)
            values = {"x": y, "y": x} if larger == "x" else {"x": x, "y": y}
            case = values | {"n": rng.uniform(-1.6, -0.7), "e": values["x"]}
            case |= {f"d{name}": rng.choice([-1, 1]) * rng.uniform(0.3, 0.8) for name in "xyn"}
            if larger == "x":
                case["dn"] = abs(case["dn"])      # n < 0, and who compares tangents sees the opposite
            case["de"] = case["dx"] + rng.choice([-1, 1]) * rng.uniform(0.1, 0.2)
            found.append({name: round(float(case[name]), 3) for letter in NAMES for name in (letter, "d" + letter)}
                         | {"expressions": EXPRESSIONS})
        return found

    def truth(self, case):
        steps = {name: Step(case[name], TINY * case["d" + name]) for name in NAMES}
        values, found = ({text: eval(text, {"exp": np.exp, "tanh": np.tanh}, names) for text in case["expressions"]}
                         for names in (case, steps))
        return {"value": {text: float(out) for text, out in values.items()},
                "tangent": {text: float(out.imag / TINY) for text, out in found.items()},
                "operands": {name: [case[name], case["d" + name]] for name in NAMES}}


# ---------------------------------------------------------------- 02.2

def constant(case):
    """The output that doesn't depend on x."""
    return 2 if len(case["w"]) == 2 else 0.5


def network(case, x):
    """y = u·tanh(w·x) + x₀·xₙ₋₁, and a last output that is always the same; x may be complex, or several as columns."""
    y = case["u"] @ np.tanh(case["w"] @ x) + x[0] * x[-1]
    return np.concatenate([y, np.full_like(y[:1], constant(case))])


def jacobian(case):
    """By complex steps, all columns at once."""
    x = case["x"]
    return network(case, x[:, None] + 1j * TINY * np.eye(len(x))).imag / TINY


def right(case):
    J = jacobian(case)
    return {"y": network(case, case["x"]), "tangent": J @ case["v"], "columns": J, "rows": J}


def but(**wrong):
    """Right outputs but for those named, which are functions of the case and its Jacobian."""
    def outputs(case):
        J = jacobian(case)
        return right(case) | {name: function(case, J) for name, function in wrong.items()}
    return outputs


def exchanged(case):
    """What a jvp gives that takes v for the point and x for the direction."""
    n = len(case["x"])
    by_columns = [jacobian(case | {"x": e}) @ case["x"] for e in np.eye(n)]
    return right(case) | {"y": network(case, case["v"]), "tangent": jacobian(case | {"x": case["v"]}) @ case["x"],
                          "columns": np.stack(by_columns, axis=1)}


def last(J, number):
    """One number per output: this for the last, 0 for the others."""
    return np.append(np.zeros(len(J) - 1), number)


def from_differences(case, got):
    """No pass had a tangent in it: f was called with plain numbers."""
    passes = list(got["passes of jvp"]) + list(got["passes by columns"])
    return bool(passes) and all(np.isnan(np.asarray(tangents, dtype=float)).all() for tangents in passes)


def as_many(name, count):
    return lambda case, got: len(got[name]) == count(case)


def outputs_of(case):
    return len(case["u"]) + 1


class JacobianByColumns(Check):
    exercise = "02.2"
    tolerance = 1e-11
    signatures = [
        when("the array x has other numbers after jvp, so that what comes next is taken at another point: leave x and "
             "v as they are", lambda case, got: not np.array_equal(got["x"], case["x"])),
        when("the derivatives come from finite differences: f was called with plain numbers, and half of the digits "
             "are lost. Call it once, with Duals", from_differences),
        gives("every column is J·(1, …, 1), the sum of all columns: for the column j only the tangent j is 1",
              but(columns=lambda case, J: np.repeat(J.sum(1)[:, None], len(J[0]), 1))),
        gives("jvp goes in the direction of ones, whatever v says: the tangents that go in are the numbers of v",
              but(tangent=lambda case, J: J.sum(1),
                  columns=lambda case, J: np.repeat(J.sum(1)[:, None], len(J[0]), 1))),
        gives("jvp goes in the direction of x: the tangents that go in are the numbers of v",
              but(tangent=lambda case, J: J @ case["x"],
                  columns=lambda case, J: np.repeat((J @ case["x"])[:, None], len(J[0]), 1))),
        gives("value and tangent are exchanged on the way in: x goes into the values, v into the tangents",
              exchanged),
        *[gives("jvp returns (y, J·v), in this order", wrong) for wrong in (
            but(y=lambda case, J: J @ case["v"], tangent=lambda case, J: network(case, case["x"])),
            but(y=lambda case, J: J @ case["v"], tangent=lambda case, J: network(case, case["x"]),
                columns=lambda case, J: np.repeat(network(case, case["x"])[:, None], len(J[0]), 1)))],
        gives("an output that is a plain number doesn't depend on x: its tangent is 0, not the number",
              but(tangent=lambda case, J: J @ case["v"] + last(J, constant(case)),
                  columns=lambda case, J: J + last(J, constant(case))[:, None])),
        gives("jvp gives J without the direction: v must go in as the tangents, and J·v has one number per output",
              but(tangent=lambda case, J: J)),
        gives("by columns, the Jacobian is transposed: J·e is a column, so J[:, j] belongs to the input j",
              but(columns=lambda case, J: J.T)),
        gives("columns as rows: the columns were laid one after the other into the rows of an m × n array. They are "
              "the right numbers in the wrong places; stack them along axis 1",
              but(columns=lambda case, J: J.T.reshape(J.shape))),
        gives("the direction isn't set back: after column 0 its 1 stays, and every column is the sum of all up to it",
              but(columns=lambda case, J: np.cumsum(J, axis=1))),
        gives("the basis isn't normalised: the column j came out x[j] times too large, because the direction has x[j] "
              "in place of 1", but(columns=lambda case, J: J * case["x"])),
        gives("by rows, the Jacobian is transposed: u·J is a row, so the result of the vjp for output i is J[i, :]",
              but(rows=lambda case, J: J.T)),
        gives("rows as columns: the rows were laid one after the other into an n × m array and turned. They are the "
              "right numbers in the wrong places", but(rows=lambda case, J: J.reshape(J.T.shape).T)),
        gives("every row is (1, …, 1)·J, the sum of all rows: for the row i only u[i] is 1",
              but(rows=lambda case, J: np.repeat(J.sum(0)[None], len(J), 0))),
        gives("u isn't set back: after row 0 its 1 stays, and every row is the sum of all up to it",
              but(rows=lambda case, J: np.cumsum(J, axis=0))),
    ]
    demands = [
        demand("right, but jvp calls f more than once: the values and the tangents come out of the same pass",
               as_many("passes of jvp", lambda case: 1)),
        demand(lambda case: f"right, but with another number of passes than needed: by columns f is called once per "
                            f"input, {len(case['x'])} times here, and each call gives a whole column",
               as_many("passes by columns", lambda case: len(case["x"]))),
        demand(lambda case: f"right, but with another number of passes than needed: by rows the vjp is called once per "
                            f"output, {outputs_of(case)} times here, and each call gives a whole row",
               as_many("passes by rows", outputs_of)),
    ]

    def cases(self, rng, ranks):
        return [{"w": 0.7 * rng.standard_normal((hidden, n)), "u": rng.standard_normal((m - 1, hidden)),
                 "x": rng.uniform(0.3, 0.9, n) * rng.choice([-1, 1], n), "v": rng.standard_normal(n)}
                for n, hidden, m in ((6, 3, 4), (2, 4, 5), (3, 2, 3), (1, 2, 2))]

    def truth(self, case):
        return right(case)

    def picture(self, runs, path):
        (case, got), = runs[1][:1]
        ways = ("columns", "rows")
        return draw_filling({way: (np.asarray(got[way]), got[f"passes by {way}"]) for way in ways}, path)


PANELS = 4


def draw_filling(found, path):
    """Entries in the order in which the learner's passes found them. found: {"columns": (Jacobian, directions), …}."""
    from exercises.frame.pictures import canvas, save
    figure, axes = canvas(2, PANELS, size=(9.2, 4.2))
    largest = np.abs(found["columns"][0]).max()
    for line, (way, axis, name) in enumerate((("columns", 1, "JVP"), ("rows", 0, "VJP"))):
        J, passes = found[way]
        order = [int(np.argmax(np.abs(direction))) for direction in passes]
        stages = np.linspace(1, len(order), PANELS).round().astype(int).tolist()
        for panel, done in zip(axes[line], stages, strict=True):
            known = np.isin(np.arange(J.shape[axis]), order[:done])
            shown = np.where(known[None, :] if axis else known[:, None], J, np.nan)
            panel.set_facecolor("#f1f1ef")
            panel.imshow(shown, cmap="RdBu_r", vmin=-largest, vmax=largest)
            for (i, j), number in np.ndenumerate(shown):
                if np.isfinite(number):
                    panel.text(j, i, f"{number:.1f}".replace("-0.0", "0.0"), ha="center", va="center", fontsize=8,
                               color="white" if abs(number) > 0.6 * largest else "#333333")
            panel.set_xticks(np.arange(1, J.shape[1]) - 0.5, [])
            panel.set_yticks(np.arange(1, J.shape[0]) - 0.5, [])
            panel.grid(color="white", linewidth=1.5)
            panel.tick_params(length=0)
            panel.spines[:].set_visible(False)
            panel.set_xlabel(f"after {done} {name}{'s' * (done != 1)}")
        axes[line, 0].set_ylabel(f"by {way}", fontsize=12, fontweight="bold")
    save(figure, path)
    return (f"your Jacobian of {len(J)} outputs by {len(J[0])} inputs: {len(found['columns'][1])} forward passes fill "
            f"it by columns, {len(found['rows'][1])} backward passes by rows")


# ---------------------------------------------------------------- 02.3

def still_a_dual(case, got):
    return any(not isinstance(out, (int, float, np.generic, np.ndarray)) for out in got["derivative"].values())


def like(**mistake):
    """Whether all that came out is what nested(**mistake) gives."""
    def predicate(case, got):
        expected = nested(**mistake)(case)["derivative"]
        return all(np.isclose(got["derivative"][text], float(value), rtol=1e-9, atol=1e-12)
                   for text, value in expected.items())
    return predicate


class Derivative(Check):
    exercise = "02.3"
    signatures = [
        when("a derivative is still a Dual when all derivatives are through: the result of derivative is the tangent "
             "for its own level", still_a_dual),
        gives("where f doesn't depend on its argument, the tangent of an outer derivative is taken for the inner "
              "one's: a result of another level has derivative 0", nested(any_result=True)),
        gives("the level is taken from the argument, one more than it has: two that are under way then have the same "
              "level, as in d/dx [x · d/dy (x + y)] at a plain number y, and are confused. Ask for a new level each "
              "time",
              nested(levels=lambda level: level + 1)),
        gives("perturbation confusion: d/dx [x · d/dy (x + y)] comes out as 2 in place of 1, because the inner "
              "derivative takes the outer one's tangent of x for its own. Every derivative needs a level of its own, "
              "and to it a Dual of another level is a constant", nested(levels=lambda level: 1)),
        gives("the left operand's level decides, so that x + y and y + x have different derivatives: take the higher "
              "one",
              nested(choose=lambda left, right: left or right)),
        gives("the outer derivative is lost: x was made a plain number before the inner derivative was taken, so that "
              "nothing depends on the outer x any more", nested(lowered="x")),
        gives("in exp the value was made a plain number: first derivatives are right, those of derivatives aren't. The "
              "value may be a Dual: call exp on it, not math.exp", nested(lowered="exp")),
        gives("parts lets a lower level's tangent go: a Dual of another level is a constant to this one, but as a "
              "whole, with what it carries for the derivatives around", nested(lowered="parts")),
        when("a derivative is right to some digits only, as a difference quotient is, (f(x + h) − f(x − h)) / 2h. "
             "The tangent is right to all of them", to_some_digits),
        when("derivative gives the value of f and not its tangent: of the two parts it is the second", like(part=0)),
        when("the product's tangent has a third term, ȧ·ḃ: that is the one with ε·ε, which is 0", like(product="all")),
        *[when("of the product rule ȧ·b + a·ḃ only one half is there", like(product=half))
          for half in ("left", "right")],
        gives("exp lacks the chain rule: the tangent is exp(value) times the tangent of x",
              nested(chain=False)),
    ]

    def cases(self, rng, ranks):
        return [{"a": round(rng.uniform(0.4, 0.8), 3), "b": round(rng.uniform(1.1, 1.5), 3), "texts": list(TEXTS)}]

    def truth(self, case):
        return {"derivative": {text: float(TEXTS[text](case["a"], case["b"])) for text in case["texts"]}}
