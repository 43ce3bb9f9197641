"""What the answers of chapter 5 are tried with, and the mistakes that are known."""

import math
from itertools import permutations

import numpy as np

from exercises.frame import Check, demand, gives, when

from . import optimizers
from .entropies import (
    broken_rows,
    count,
    entropy,
    logs,
    mean_not_sum,
    number,
    one_hot,
    probabilities,
    right_gradient,
    scaled,
    shifted_by,
)
from .optimizers import adam, draw, sgd, weighted
from .reading import draw_curves, network, right_answers

# ---------------------------------------------------------------- 05.1


GRADIENTS = "by_x", "by_weight", "by_bias"


def by_rows(x, dy):
    """The two with one axis before the last."""
    return x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])


def linear(case, x=None, dy=None, weight=None, bias=None):
    """The right outputs, sums written out; with another input, cotangent, weight or bias what those would give."""
    weight = case["weight"] + case["update"] if weight is None else weight
    bias = case["bias"] + case["bias_update"] if bias is None else bias
    dy = case["dy"] if dy is None else dy
    rows, cotangents = by_rows(case["x"] if x is None else x, dy)
    return {"y": np.einsum("...i,oi->...o", case["x"], weight) + bias,
            "by_x": np.einsum("...o,oi->...i", dy, weight),
            "by_weight": np.einsum("ro,ri->oi", cotangents, rows), "by_bias": np.einsum("ro->o", cotangents)}


def mean_over_rows(case):
    right, rows = linear(case), np.float64(case["dy"].size // case["dy"].shape[-1])
    with np.errstate(invalid="ignore"):
        return right | {"by_weight": right["by_weight"] / rows, "by_bias": right["by_bias"] / rows}


def added_to_earlier(case):
    earlier = linear(case, case["earlier_x"], case["earlier_dy"])
    right = linear(case)
    return right | {name: right[name] + earlier[name] for name in ("by_weight", "by_bias")}


class LinearLayer(Check):
    exercise = "05.1"
    signatures = [
        when("weight or bias has other numbers after the calls than before: backward finds gradients, and the "
             "optimizer alone moves the parameters", lambda case, got: not all(
                 np.allclose(got[f"{name}_after"], case[name] + case[update])
                 for name, update in (("weight", "update"), ("bias", "bias_update")))),
        gives("the cotangent is ignored: these are the gradients of Σ y, with ones in place of dy",
              lambda case: linear(case, dy=np.ones_like(case["dy"]))),
        gives("the gradients by weight and bias are divided by the number of rows: whoever made dy has decided about "
              "means; here rows are summed", mean_over_rows),
        gives("the gradient by bias isn't summed: bias has gone into every row of y, so what comes back from all rows "
              "adds up, over every axis but the last", lambda case: {"by_bias": case["dy"]}),
        gives("the gradient by bias is summed over the first axis only; with more than two axes there are rows along "
              "each of the others too", lambda case: {"by_bias": case["dy"].sum(axis=0)} if case["dy"].ndim > 1 else
              linear(case)),
        gives("the gradient by weight is transposed: it must have weight's own shape, (outputs, inputs)",
              lambda case: {"by_weight": linear(case)["by_weight"].T}),
        *(gives("the three gradients come in another order: asked for is x's, then weight's, then bias's",
                lambda case, order=order: dict(zip(GRADIENTS, (linear(case)[name] for name in order), strict=True)))
          for order in permutations(GRADIENTS) if order != GRADIENTS),
        gives("the gradient by x has one axis before the last, whatever x has: rows are for the sums by weight and "
              "bias; by x it has x's own shape", lambda case: {"by_x": by_rows(case["x"], linear(case)["by_x"])[1]}),
        gives("the gradient by bias has kept the axis that was summed over: it has bias's own shape, (outputs,), and "
              "subtracted from bias it would make a matrix of it",
              lambda case: {"by_bias": linear(case)["by_bias"][None]}),
        gives("the bias is forgotten in forward", lambda case: linear(case, bias=0.0)),
        gives("the gradient by weight belongs to the x of another layer: what forward keeps is kept for all layers, in "
              "the class or in a global name. Keep it on self",
              lambda case: {"by_weight": linear(case, x=case["x"] + 1)["by_weight"]}),
        gives("the gradient by weight belongs to the x of an earlier forward: each forward must put its own in place "
              "of the one before",
              lambda case: {"by_weight": linear(case, x=case["earlier_x"])["by_weight"]}),
        gives("the gradients of earlier calls are still in there: a call of backward is for itself", added_to_earlier),
        gives("the layer works with a copy of bias that was made at the beginning: what an optimizer has written into "
              "the array since isn't seen", lambda case: linear(case, bias=case["bias"])),
        gives("the layer works with copies of weight and bias that were made at the beginning: what an optimizer has "
              "written into the arrays since isn't seen",
              lambda case: linear(case, weight=case["weight"], bias=case["bias"])),
        gives("the layer works with a copy of weight that was made at the beginning: what an optimizer has written "
              "into the array since isn't seen", lambda case: linear(case, weight=case["weight"])),
    ]

    demands = [demand("right, but the next call writes over what an earlier one returned, or the caller does, whose "
                      "own dy or x it is: y and the gradients belong to who got them. Return new arrays",
                      lambda case, got: got["kept"]),
               demand("right, but float64 comes out where all that went in was float32: the gradients of a float32 "
                      "network need twice the memory from here on. np.zeros and np.ones make float64 unless told "
                      "otherwise", lambda case, got: "float64" not in got["dtypes"])]

    def cases(self, rng, ranks):
        found = []
        for before, inputs, outputs in (((7,), 5, 3), ((2, 5), 4, 6), ((6,), 4, 4), ((), 3, 2), ((2, 0, 3), 3, 2),
                                        ((4,), 3, 1)):
            def normal(*shape):
                return rng.standard_normal(shape)
            found.append({"weight": normal(outputs, inputs), "bias": normal(outputs), "update": normal(outputs, inputs),
                          "bias_update": normal(outputs), "x": normal(*before, inputs), "dy": normal(*before, outputs),
                          "earlier_x": normal(*before, inputs), "earlier_dy": normal(*before, outputs)})
        return found

    def truth(self, case):
        return linear(case) | {"weight_after": case["weight"] + case["update"],
                               "bias_after": case["bias"] + case["bias_update"]}


# ---------------------------------------------------------------- 05.2

class CrossEntropy(Check):
    exercise = "05.2"
    signatures = [
        when("exp overflows: exp(710) is inf, and inf / inf is nan. Softmax doesn't change if the same number is "
             "subtracted from all logits of a row: subtract the row's largest", broken_rows(lambda logits: 0.0)),
        when("one number is subtracted from all rows, the largest of all logits: rows that lie far below it become "
             "exp(−1000) = 0, and 0 / 0 is nan. Each row needs its own largest", broken_rows(np.max)),
        when("the largest magnitude of each row is subtracted, not the largest logit: where that magnitude is that of "
             "−1000, exp(−2000) is 0, and 0 / 0 nan",
             broken_rows(lambda logits: abs(logits).max(axis=1, keepdims=True))),
        gives("the maximum is taken over the wrong axis, per class instead of per row: subtracting a different number "
              "from each logit of a row is another softmax",
              lambda case: shifted_by(case, case["logits"].max(axis=0)) if len(case["labels"]) else entropy(case)),
        when("log of 0: the softmax of the right class rounds to 0. Work out its log without it: the row's (shifted) "
             "logit minus log Σ exp", lambda case, got: number(got["loss"]) == np.inf and right_gradient(case, got)),
        when("the loss is capped: a probability that is clipped, or has 1e-12 added to it, hides how wrong the model "
             "is (and its gradient is another function's). Without log(softmax) nothing has to be clipped",
             lambda case, got: number(got["loss"]) < entropy(case)["loss"] and right_gradient(case, got)
             and case["logits"].max() > 1000),
        gives("the right class's logit isn't shifted, and the others are: subtract the row's largest from both, or add "
              "it to the logarithm",
              lambda case: entropy(case) | {"loss": entropy(case)["loss"] - case["logits"].max(axis=1).sum()}),
        gives(mean_not_sum, lambda case: scaled(case, 1 / count(case))),
        gives(mean_not_sum, lambda case: scaled(case, 1 / count(case)) if len(case["labels"]) else {"loss": np.nan}),
        gives("divided by the number of rows twice, and asked for is a sum: not once",
              lambda case: scaled(case, 1 / count(case) ** 2)),
        gives("loss and gradient are returned in the wrong order: (loss, gradient)",
              lambda case: dict(zip(("gradient", "loss"), entropy(case).values(), strict=True))),
        gives("1 is added at the label of each row; it must be subtracted",
              lambda case: {"gradient": probabilities(case) + one_hot(case)}),
        gives("the gradient is the softmax alone: at the label of each row 1 must be subtracted",
              lambda case: {"gradient": probabilities(case)}),
        gives("1 is subtracted in the wrong places: a[:, labels] means all rows of these columns, a[rows, labels] one "
              "number in each row",
              lambda case: {"gradient": probabilities(case) - one_hot(case).max(axis=0, initial=0.0)}),
        gives("1 is subtracted in the wrong places: a[labels] means whole rows, and labels are columns",
              lambda case: {"gradient": probabilities(case) - np.isin(np.arange(len(case["labels"])), case["labels"]
                                                                      )[:, None]}),
        *(gives("the softmax runs over the wrong axis: the classes of one row add up to 1, not the rows of one class",
                lambda case, least=least: {"loss": -np.logaddexp(logs(case, 0), least)[one_hot(case) == 1].sum(),
                                           "gradient": probabilities(case, 0) - one_hot(case)})
          for least in (math.log(1e-300), -math.inf)),
    ]
    demands = [demand("float64 comes back for float32 logits: everything after it computes in float64 too, at half the "
                      "speed and twice the memory. np.eye, np.zeros and np.ones make float64 unless told otherwise",
                      lambda case, got: got["dtypes"][1] != "float64"),
               demand("the gradient isn't of the logits' dtype float32",
                      lambda case, got: got["dtypes"][1] == "float32")]

    def cases(self, rng, ranks):
        def case(logits, classes):
            return {"logits": logits, "labels": rng.integers(classes, size=len(logits))}
        huge = rng.choice([-1e4, 1e4], size=(6, 4)) + rng.standard_normal((6, 4))
        huge[:, 2], huge[0] = 1e4, [-1e4, 0, 1e4, -1e4]
        apart = rng.standard_normal((6, 5)) + np.array([[0], [300], [-900], [1000], [-850], [100]])
        found = [case(2 * rng.standard_normal((9, 5)), 5), case(huge, 4), case(apart, 5),
                 case(np.empty((0, 3)), 3)]
        found[1]["labels"][0] = 0       # a label of probability exp(-20000)
        return found

    def truth(self, case):
        return entropy(case)


# ---------------------------------------------------------------- 05.3 and 05.4

SHAPES = [(4, 3), (5,), (4, 3), (2, 1, 3), ()]

NOT_IN_PLACE = ("the parameters haven't moved: p = p − … gives the name p to a new array, and replacing an element of "
                "the list leaves the model's own array as it was; p -= … writes into it")
OF_A_COPY = ("parameters with several axes haven't moved: p.ravel() and p.reshape(-1) of an array that lies by "
             "columns, as these do, are copies of it. Write into p itself, p -= …")
LR_FIXED = ("the lr that step is given is ignored: the optimizer goes on with the one from its construction, and a "
            "schedule would have no effect")
LR_OF_0 = ("an lr of 0 is taken for none: `lr or self.lr` asks whether lr is true, and 0 isn't. A schedule that begins "
           "or ends at 0 would jump. Ask `lr is None`")
NO_AXES = ("of a parameter without axes nothing is remembered: 0 * p makes a number of it, no array, and v *= … "
           "and v += … leave a number as it was. np.zeros_like(p) stays an array")
LR_KEPT = "an lr given to one step is kept for the steps after it; it is for that step alone"


def right_until(case, got, right):
    """How many steps are right in all parameters."""
    return min(next((t for t, (a, b) in enumerate(zip(mine, path, strict=False)) if not np.allclose(a, b, 1e-7, 1e-12)),
                    len(path)) for mine, path in zip(got["parameters"], right(case)["parameters"], strict=True))


REMEMBERED = demand(lambda case, got: f"every step is right, but for float32 parameters it remembers {got['kept'][-1]} "
                    "arrays, of twice the size. np.zeros(shape) makes float64 unless told otherwise; np.zeros_like(p) "
                    "has p's dtype", lambda case, got: training(case) or "float64" not in got["kept"])


def vaguely(right):
    """Signatures for what nobody has thought of: where to look."""
    return [when("without weight decay every step is right: look at the decay",
                 lambda case, got: case["settings"].get("weight_decay")),
            when("the first step of every run is right, later ones aren't: look at what is remembered from step to "
                 "step, and at what depends on the number of the step",
                 lambda case, got: right_until(case, got, right) > 0),
            when("the first step is wrong already: write it down on paper, where everything that is remembered is 0",
                 lambda case, got: right_until(case, got, right) == 0)]


class Momentum(Check):
    exercise = "05.3"
    signatures = [
        gives("only the first parameter moves: the loop ends, or returns, too early", optimizers.first_moves),
        gives(OF_A_COPY, lambda case: optimizers.ravelled(case, sgd)),
        gives(NOT_IN_PLACE, optimizers.unmoved),
        gives(LR_FIXED, lambda case: sgd(case, lrs=optimizers.fixed)),
        gives(LR_KEPT, lambda case: sgd(case, lrs=optimizers.kept)),
        gives(LR_OF_0, lambda case: sgd(case, lrs=optimizers.never_0)),
        gives("the steps go up the gradient: the loss grows. lr · velocity is subtracted",
              lambda case: sgd(case, step=lambda p, v, g, lr, mu: p + lr * v)),
        gives(NO_AXES, lambda case: sgd(case, lambda mu, grads, _: weighted(
            lambda age: mu ** age, grads if grads[0].ndim else grads[-1:]))),
        gives("nothing is remembered: these are the steps of momentum 0",
              lambda case: sgd(case, lambda mu, grads, _: grads[-1])),
        gives("the velocity is a running mean, momentum · v + (1 − momentum) · g: the steps are too short by the "
              "factor 1 − momentum. Adam does that; momentum adds the whole gradient",
              lambda case: sgd(case, lambda mu, grads, _: weighted(lambda age: (1 - mu) * mu ** age, grads))),
        gives("that is Nesterov's momentum: it steps along gradient + momentum · velocity; asked for is the velocity "
              "itself", lambda case: sgd(case, step=lambda p, v, g, lr, mu: p - lr * (g + mu * v))),
        gives("the learning rate is inside the velocity: as long as lr stays, that is the same, but after a change the "
              "steps go on with the old lr for a while (here the lr changes)",
              lambda case: sgd(case, lambda mu, grads, lrs: weighted(
                  lambda age: mu ** age, [lr * g for lr, g in zip(lrs, grads, strict=True)]),
                  step=lambda p, v, g, lr, mu: p - v)),
        gives("two optimizers share their velocities (they are kept in the class, or in a default argument): each "
              "needs its own, made in __init__", optimizers.shared_velocity),
        gives("the first velocity is the caller's gradient array itself, and the caller writes the next gradient into "
              "it: copy it", lambda case: sgd(case, optimizers.gradient_kept)),
        gives("the velocity of the last step is used: first the velocity takes the gradient in, then the parameter "
              "moves",
              lambda case: sgd(case, lambda mu, grads, _: weighted(lambda age: mu ** age, grads[:-1]))),
        gives("a parameter whose gradient is 0 stands still here, and its velocity with it: that goes on, and shrinks",
              lambda case: sgd(case, optimizers.only_with_gradient)),
        when("with a momentum that is given every step is right, and without isn't: its default is 0",
             lambda case, got: "momentum" not in case["settings"]),
        *vaguely(sgd),
    ]
    demands = [REMEMBERED]

    def cases(self, rng, ranks):
        changing = [None, None, 0.02, None, 0.3, 0.0, 0.1, None] + [None] * 20
        found = [draw(rng, SHAPES, changing, lr=0.05, momentum=0.8), draw(rng, SHAPES[:2], [None, 0.2, None], lr=0.1)]
        found[0]["grads"][9][1][...] = 0
        return found

    def truth(self, case):
        return sgd(case)


# ---------------------------------------------------------------- 05.4


def training(case):
    return "images" in case


class AdamAndAdamW(Check):
    exercise = "05.4"
    signatures = [
        gives(OF_A_COPY, lambda case: optimizers.ravelled(case, adam)),
        gives(NOT_IN_PLACE, optimizers.unmoved),
        gives(NOT_IN_PLACE + ". Only the decay was written there", optimizers.only_decayed),
        when("with settings that are given every step is right, and without isn't: the defaults are lr=1e-3, "
             "betas=(0.9, 0.999), eps=1e-8, no decay", lambda case, got: case.get("defaults")),
        gives(LR_FIXED, lambda case: adam(case, lrs=optimizers.fixed)),
        gives(LR_KEPT, lambda case: adam(case, lrs=optimizers.kept)),
        gives(LR_OF_0, lambda case: adam(case, lrs=optimizers.never_0)),
        gives(NO_AXES, lambda case: adam(case, second=optimizers.forgotten)),
        gives("no bias correction: m and v begin at 0, and so in the first steps both are far too small, v the longer; "
              "divide them by 1 − βᵗ", lambda case: adam(case, correct=(False, False))),
        gives("m is corrected for its bias, v is not", lambda case: adam(case, correct=(True, False))),
        gives("v is corrected for its bias, m is not", lambda case: adam(case, correct=(False, True))),
        gives("eps is under the root, √(v̂ + eps): of eps = 1e-8 that makes 1e-4, and small gradients hardly move "
              "anything; it stands beside the root, √v̂ + eps", lambda case: adam(case, inside=True)),
        gives("eps is 1e-8, whatever is given",
              lambda case: adam(case | {"settings": case["settings"] | {"eps": 1e-8}})),
        gives("betas are (0.9, 0.999), whatever is given",
              lambda case: adam(case | {"settings": case["settings"] | {"betas": [0.9, 0.999]}})),
        gives("eps is missing: it keeps the denominator from 0",
              lambda case: adam(case | {"settings": case["settings"] | {"eps": 0.0}})),
        gives("the root is missing: m̂ is divided by √v̂ + eps", lambda case: adam(case, rooted=np.abs)),
        gives("eps is added before the bias correction, to √v instead of √v̂: early on it counts for many times eps",
              lambda case: adam(case, eps_before=True)),
        gives("t counts from 0 in the bias correction: the first step divides by 1 − β⁰ = 0",
              lambda case: adam(case, clock=lambda i, t, n: t - 1)),
        gives("t begins with 2: in the first step the corrections are 1 − β₁ and 1 − β₂",
              lambda case: adam(case, clock=lambda i, t, n: t + 1)),
        gives("the corrections stay those of the first step: they need βᵗ, and t counted up in every step",
              lambda case: adam(case, clock=lambda i, t, n: 1)),
        *[gives("the correction is 1 − βᵗ, β to the power of t: neither (1 − β)ᵗ nor 1 − β · t",
                lambda case, factors=factors: adam(case, factors=factors))
          for wrong in (lambda beta, t: (1 - beta) ** t, lambda beta, t: 1 - beta * t)
          for factors in optimizers.factors_with(wrong)],
        gives("the corrected means are remembered in place of m and v, and corrected once more in each step: m̂ and v̂ "
              "are made anew each time", lambda case: adam(case, correct=(False, False),
                                                       second=optimizers.corrected_in_place)),
        *[gives(f"{which} nothing is remembered: m = β₁m + … gives the name to a new array, and the one that is kept "
                "stays 0", lambda case, kept=kept: adam(case, second=optimizers.not_kept(*kept)))
          for which, kept in (("of m and v", (1, 1)), ("of m", (1, 0)), ("of v", (0, 1)))],
        gives("m takes in β₁ · g; the new gradient counts 1 − β₁",
              lambda case: adam(case, second=lambda m, v, grads, b1, b2: (m * b1 / (1 - b1), v))),
        gives("1 − β₂ is squared, too: v takes in (1 − β₂) · g²",
              lambda case: adam(case, second=lambda m, v, grads, b1, b2: (m, v * (1 - b2)))),
        gives("t is counted once per parameter instead of once per step: the bias correction is over too soon, and "
              "every parameter gets another", lambda case: adam(case, clock=lambda i, t, n: n * (t - 1) + i + 1)),
        gives("weight decay went through m and v (that is L2, Adam's) where decoupled=True asks for AdamW's: the decay "
              "is divided by √v̂ like the rest", lambda case: adam(case, decoupled=False)),
        gives("weight decay shrinks the parameter (that is AdamW's) where decoupled=False asks for L2, inside g",
              lambda case: adam(case, decoupled=True)),
        gives("the decoupled decay isn't multiplied by lr: the parameter shrinks by the whole of weight_decay at every "
              "step", lambda case: adam(case, decay=lambda p, lr, wd: p * (1 - wd))),
        gives("the decoupled decay is with the optimizer's lr, where step was given another",
              lambda case: adam(case, decay=lambda p, lr, wd: p * (1 - case["settings"]["lr"] * wd))),
        gives("the weights decay twice where decoupled=True: g stays the gradient itself there",
              lambda case: adam(case, both=True)),
        gives("the decoupled decay comes after the step: it must be of the parameter as it was before",
              lambda case: adam(case, decay_after=True)),
        when("t, the number of the step, goes on where another optimizer has stopped: it belongs to the object (self), "
             "not to the class or the module", optimizers.counted_on),
        gives("betas are the wrong way round: the first is of the gradients, the second of their squares",
              lambda case: adam(case, swapped=True)),
        gives("v is made of |g| instead of g²", lambda case: adam(case, power=1)),
        gives("m and v are one and the same array: m = v = … gives two names to one list",
              lambda case: adam(case, second=optimizers.one_array)),
        gives("m and v are shared between the parameters of one shape: every parameter needs its own",
              optimizers.states_by_shape),
        gives("the steps go up the gradient: the loss grows", lambda case: adam(case, sign=-1)),
        *vaguely(adam),
    ]
    demands = [REMEMBERED,
               demand("every single step is right, but the network made of your layers, loss and optimizers doesn't "
                      "learn the digits (less than 80 % of the test images)",
                      lambda case, got: not training(case)
                      or min(right_answers(case, got[name]) for name in ("sgd", "adam")) > 0.8)]

    def cases(self, rng, ranks):
        lrs = [None, None, 0.02, None, 0.005, 0.0, 0.1, None] + [None] * 30
        return [draw(rng, SHAPES, lrs, lr=0.01, betas=[0.8, 0.97], eps=1e-8),
                draw(rng, SHAPES[:2], lrs[:9], 1e-3, lr=0.01, betas=[0.9, 0.999], eps=1e-4),
                draw(rng, SHAPES[:2], lrs[:9], 1e-3, lr=1e-3, betas=[0.9, 0.999], eps=1e-8) | {"defaults": True},
                draw(rng, SHAPES, lrs, 0.1, lr=0.01, betas=[0.7, 0.95], eps=1e-6, weight_decay=0.3),
                draw(rng, SHAPES, lrs, 0.1, lr=0.01, betas=[0.7, 0.95], eps=1e-6, weight_decay=0.3, decoupled=True),
                network(rng)]

    def truth(self, case):
        return {} if training(case) else adam(case)

    def picture(self, runs, path):
        (case, got), = (run for run in runs[1] if training(run[0]))
        return draw_curves(case, got, path)
