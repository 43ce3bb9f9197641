"""What the answers of chapter 13 are tried with, and the mistakes that are known."""

import numpy as np

from exercises.frame import Check, demand, gives, when
from exercises.frame.kernels import BY_KERNELS, LAUNCHED, NO_HARM, both, harm, is_out

from .drawing import bars, counted, numpy_adam, numpy_softmax
from .mistakes import (
    block_of,
    by_thousands,
    cut_at_a_block,
    every_fourth,
    first_block_only,
    first_only,
    first_row,
    fours,
    neighbours,
    no_sum,
    one_element_each,
    one_largest,
    padded_with,
    padding,
    places,
    program_per_column,
    right_softmax,
    right_sum,
    rows_of_out_at,
    shifted_by_padding,
    softmax,
    tight_rows,
    unshifted,
    without_last_block,
)
from .updates import (
    adamw,
    by_element,
    counted_with_others,
    decay_by_block,
    decay_by_program,
    last_rows_left,
    left_behind,
    mistake,
    never_updated,
    programs,
    uncorrected,
    uphill,
    with_settings,
)

# ---------------------------------------------------------------- 13.1


class VectorAdd(Check):
    exercise = "13.1"
    tolerance = 1e-6
    signatures = [
        when("all programs work on the same elements, the first block: a program's places begin at tl.program_id(0) * "
             "BLOCK", both(is_out("out", first_block_only), lambda case, got: case["x"].size <= block_of(case)
                           or harm(got, "two programs") > 0)),
        when("a program begins one element behind its neighbour's beginning: program_id counts programs, not "
             "elements, so it must be multiplied by BLOCK",
             both(is_out("out", one_element_each), lambda case, got: harm(got, "two programs") > 0)),
        when("the grid is one program short: size // block leaves out the last block, which is filled in part only. "
             "Round up", is_out("out", without_last_block)),
        when("the grid doesn't follow `block`: it is made for blocks of 1,024", is_out("out", by_thousands)),
        when("the step is in bytes: a.strides is, but pointers in a kernel count elements. Divide by a.itemsize",
             is_out("out", every_fourth)),
        when("a stride may be negative: x[::-1] begins at its last element in memory, its step is -1, and all others "
             "lie before it", both(lambda case, got: min(case["steps"]) < 0, is_out("out", first_only))),
        when("a step of 0 is taken for 1: x is np.broadcast_to(a, n), all of whose elements lie in one place",
             both(lambda case, got: 0 in case["steps"], is_out("out", neighbours))),
        when("the strides of all three arrays are taken for 1: in x[::2] the next element is two further, and between "
             "them lies something else", is_out("out", neighbours)),
        when("x's and y's strides are taken for 1: their elements needn't be neighbours",
             is_out("out", lambda case: neighbours(case, (0, 1)))),
        when("out is written as if its elements were neighbours: out + places * step_out",
             is_out("out", lambda case: neighbours(case, (2,)))),
        when("the mask asks whether places * step < n, but n counts elements, not the memory between them: places < n",
             is_out("out", lambda case: None if max(case["steps"]) == 1 else np.where(
                 places(case) * max(case["steps"]) < case["x"].size, right_sum(case), np.nan))),
        when("one step for all: each of the three arrays has strides of its own",
             lambda case, got: len(set(case["steps"])) > 1),
        when("no mask: the last program works on a whole block, and reads and writes behind the end. In a real program "
             "that is somebody else's memory",
             lambda case, got: harm(got, "read outside") > 1 and harm(got, "written outside") > 1),
        when("the mask lets one element too many through: places run from 0 to n - 1",
             lambda case, got: harm(got, "outside") == 3 - case["steps"].count(0)),
        when("the loads have no mask: only the store is kept from the end; what is read behind it may belong to nobody",
             lambda case, got: harm(got, "read outside") > 0 and not harm(got, "written outside")),
        when("the store has no mask: what lies behind the end of out is overwritten",
             lambda case, got: harm(got, "written outside") > 0 and not harm(got, "read outside")),
    ]
    demands = [
        LAUNCHED,
        demand("right, but in more than one launch", lambda case, got: got["launches"] == 1),
        demand("right, but it moves more than 12 bytes per element: read x, read y, write out, each once",
               lambda case, got: got["bytes_read"] + got["bytes_written"] <= 12 * case["x"].size),
        demand(lambda case, got: f"right, but a program works on {got['lanes']} elements at a time, and `block` says "
                                 f"{block_of(case)}: the caller chooses it",
               lambda case, got: got["lanes"] <= block_of(case)),
        demand(lambda case, got: f"right, but {got['idle']} of {got['programs']} programs have no element, and each "
                                 f"takes its time: {-(-case['x'].size // block_of(case))} blocks of {block_of(case)} "
                                 f"cover {case['x'].size} elements",
               lambda case, got: got["idle"] < got["programs"] - got["idle"]),
        *BY_KERNELS,
    ]

    def cases(self, rng, ranks):
        found = []
        for n, steps, block in ((100, (1, 1, 1), 32), (64, (1, 1, 1), 16), (1500, (1, 1, 1), None),
                                (45, (2, 3, 4), 16), (21, (-1, 2, -3), 8), (5, (1, 1, 1), 8),
                                (20, (0, 1, 1), 8)):
            x, y = rng.standard_normal((2, n)).astype(np.float32)
            if steps[0] == 0:
                x[...] = x[0]
            found.append({"x": x, "y": y, "out": np.full(n, np.nan, np.float32), "steps": steps,
                          "block": {} if block is None else {"block": block}})
        return found

    def truth(self, case):
        return {"out": right_sum(case), "memory": NO_HARM}


# ---------------------------------------------------------------- 13.2

def off(case, got):
    """The greatest difference from the right softmax, relative to the largest number there."""
    right = right_softmax(case)
    return np.abs(got["out"] - right).max() / right.max()


class Softmax(Check):
    exercise = "13.2"
    tolerance = 2e-5        # of large numbers, whose rounding before the shift is no mistake; of others see `demands`
    signatures = [
        gives("the largest is taken over the padding, too, which holds 0: behind a row that lies far below, 0 is "
              "subtracted, and what remains is 0 / 0. With -inf there it is never the largest",
              lambda case: {"out": shifted_by_padding(case)}),
        gives("the largest isn't subtracted: exp(89) is more than float32 holds, and inf / inf is nan; far below, "
              "0 / 0 is too", lambda case: {"out": unshifted(case)}),
        gives("the padding holds 0, or another finite number: behind a row that lies below it the padding is the "
              "largest, and its exp goes into the sum. exp must make 0 of it, whatever the row holds: -inf",
              lambda case: {"out": padded_with(case, lambda x: np.zeros(1))}),
        gives("the sum goes over the padding: each lane behind the end adds exp(0) = 1, as if it held the "
              "row's largest",
              lambda case: {"out": padded_with(case, lambda x: x.max(axis=1, keepdims=True))}),
        gives("not divided by the sum: the rows don't add up to 1", lambda case: {"out": no_sum(case)}),
        gives("softmax along the wrong axis: of each column, where rows are asked for",
              lambda case: {"out": softmax(case["x"].astype(float), axis=0)}),
        gives("the largest of all rows is subtracted from each: a row far below it is exp(-200) = 0 everywhere, and "
              "0 / 0 is nan. Each row has a largest of its own", lambda case: {"out": one_largest(case)}),
        when(lambda case: f"a row has {case['x'].shape[1]} elements, and only its beginning is worked on: BLOCK is the "
                          "next power of 2 of its length, whatever that is", cut_at_a_block),
        when("the grid has a program per column; a program does one row, so x.shape[0] of them", program_per_column),
        when("rows may run backwards in memory: strides[0] is negative then, and all rows but the first lie before it",
             both(lambda case, got: case["steps"][0] < 0, is_out("out", first_row))),
        when("out's rows are written as far apart as x's: each array has strides[0] of its own",
             is_out("out", rows_of_out_at(lambda case: case["steps"][0]))),
        when("out's rows are written right behind each other: they are out.strides[0] apart, which may be more than "
             "columns", is_out("out", rows_of_out_at(lambda case: case["x"].shape[1]))),
        when("rows are taken to lie right behind each other: they are strides[0] apart, which may be more than columns",
             is_out("out", tight_rows)),
        when("a step is in bytes: strides are, but pointers in a kernel count elements. Divide by itemsize",
             lambda case, got: any(is_out("out", way)(case, got) for way in fours)),
        when("the first row alone is worked on: the grid has a program per row, and tl.program_id(0) is its row",
             is_out("out", first_row)),
        when("padded lanes are undefined: a masked load without `other` gives anything, and the largest and the sum go "
             "over all lanes", lambda case, got: padding(case) > 0 and np.isnan(got["out"]).all()),
        when("the padding is stored too: it lands behind the row's end, on the next row or somebody else's memory",
             lambda case, got: padding(case) > 0 and harm(got, "written") > 0 and not harm(got, "read outside")),
        when("the load has no mask: what lies behind a row's end is read",
             lambda case, got: padding(case) > 0 and harm(got, "read outside") > 0),
    ]
    demands = [
        LAUNCHED,
        demand(lambda case, got: f"nearly right: the softmax of one number is 1, and yours is {got['out'].min():.7f}: "
                                 "something is added to the sum, which is never below 1 and needs no eps",
               lambda case, got: case["x"].shape[1] > 1 or (got["out"] == 1).all()),
        demand(lambda case, got: f"nearly right: off by {off(case, got):.1e}, where float32 rounds to 1e-7 of the "
                                 "largest number. What is added, left out or rounded that needn't be?",
               lambda case, got: np.abs(case["x"][np.isfinite(case["x"])]).max() > 40 or off(case, got) <= 2e-6),
        demand("right, but in more than one launch", lambda case, got: got["launches"] == 1),
        demand("right, but it moves more than 8 bytes per element: a row is to be read once, and kept in registers",
               lambda case, got: got["bytes_read"] + got["bytes_written"] <= 8 * case["x"].size),
        *BY_KERNELS,
    ]

    def cases(self, rng, ranks):
        found = []
        for rows, columns, step, shift, apart, unit in (
                (5, 7, 7, 0, 2, 1), (3, 16, 16, 0, 2, 1), (4, 33, 40, 0, 2, 1), (3, 5, 8, -130, 2, 1),
                (3, 6, 6, 120, 2, 1), (2, 1, 1, 3, 2, 1), (3, 4, 4, -200, 200, 1), (2, 9000, 9000, 0, 1, 1),
                (3, 6, 6, -200, 2, 1e36),       # far below whatever padding one may think of
                (4, 6, -8, 0, 2, 1)):
            x = unit * (rng.standard_normal((rows, columns)) * 3 + shift + apart * np.arange(rows)[:, None])
            if columns == 33:
                x[1, 4:9] = -np.inf
            found.append({"x": x.astype(np.float32), "out": np.full((rows, columns), np.nan, np.float32),
                          "steps": (step, step if step < 0 else columns + 3 * (step > columns))})
        return found

    def truth(self, case):
        return {"out": right_softmax(case), "memory": NO_HARM}

    def picture(self, runs, path):
        case, got = runs[1][2]
        passes = counted(numpy_softmax, case["x"])
        return bars(path, "softmax of rows", passes, got, case["x"].size)


# ---------------------------------------------------------------- 13.3

class FusedAdam(Check):
    exercise = "13.3"
    tolerance = 2e-5
    signatures = [
        when("every program decays by the λ with its own number: decays has one per parameter, and the third number of "
             "a program's row says which", decay_by_program),
        when("a program reads from behind the tables: its row begins 3 numbers behind its neighbour's, and holds "
             "start, stop and parameter",
             lambda case, got: harm(got, "read outside") > 0 and not harm(got, "written outside")),
        when("the tail isn't masked, or its row of the table ends too late: the last program of a parameter goes on "
             "behind the parameter's end, and the next one's first elements are updated by two programs at once",
             lambda case, got: harm(got, "written") > 0),
        gives("the step isn't counted on: the corrections are those of step 1 for ever", mistake(step_of=lambda t: 1)),
        gives("the step is counted one too far: the first update is step 1", mistake(step_of=lambda t: t + 1)),
        gives("no bias correction: m and v begin at 0, so in step 1 the mean is (1-β₁) times what it should be, and "
              "the mean of squares (1-β₂) times", mistake(of_mean=uncorrected, of_squares=uncorrected)),
        gives("only the mean of squares is corrected: m / (1-β₁ᵗ) too", mistake(of_mean=uncorrected)),
        gives("only the mean is corrected: v / (1-β₂ᵗ) too", mistake(of_squares=uncorrected)),
        gives("the corrections are upside down: scale1 is 1 / (1 - β₁ᵗ), at first 10 and not 0.1, and scale2 alike",
              mistake(of_mean=lambda mean, beta, t: mean * (1 - beta ** t),
                      of_squares=lambda mean, beta, t: mean * (1 - beta ** t))),
        gives("v is corrected outside of the root, by more than it should be: √(v / (1-β₂ᵗ))",
              mistake(of_squares=lambda mean, beta, t: mean / (1 - beta ** t) ** 2)),
        gives("m and v are sums: the new gradient weighs 1-β₁ in the mean, and its square 1-β₂ in theirs",
              mistake(fresh=lambda beta: 1)),
        gives("m is a sum: the new gradient weighs 1-β₁ in the mean", mistake(fresh_in_m=lambda beta: 1)),
        gives("β₁ and β₂ are swapped: m, the mean, forgets with β₁, and v, that of the squares, with β₂",
              with_settings(betas=lambda settings: settings.get("betas", (0.9, 0.999))[::-1])),
        gives("uphill: p goes along the gradient, and should go against it", uphill),
        gives("the lr that the optimizer was made with is lost: it steps with the default, 0.001",
              with_settings(lr=lambda settings: 1e-3)),
        gives("the betas that the optimizer was made with are lost: it steps with the default, (0.9, 0.999)",
              with_settings(betas=lambda settings: (0.9, 0.999))),
        gives("the eps that the optimizer was made with is lost: it steps with the default, 1e-8",
              with_settings(eps=lambda settings: 1e-8)),
        gives("p shrinks by 1 - λ: a decay is multiplied by lr as well, like the step",
              mistake(decay=lambda case: by_element(case, case["decays"]) / case["settings"]["lr"])),
        when("the number of the step is shared by all optimizers of the program: it belongs to the object (self.t)",
             counted_with_others),
        gives("each step takes the first step's gradient: g is read from the array that was given, in each step anew; "
              "a copy stays as it was",
              lambda case: {"p": adamw(case | {"grads": case["grads"][:1].repeat(3, axis=0)})}),
        when(lambda case, got: "the grid has {1} programs here, and not {0}, one per row of the table: each parameter "
                               "has a last block of its own, so there are more than all elements fill".format(
                                   *programs(case)), last_rows_left),
        when(never_updated, lambda case, got: left_behind(case, got) != []),
        gives("the step uses the moments as they were before: p moves by what m and v are now, with this gradient in "
              "them", mistake(late=True)),
        gives("eps stands under the root: it is added to √v̂", mistake(eps_inside=True)),
        gives("eps is added to √v, before the division by √(1-β₂ᵗ): it is added to √v̂", mistake(eps_early=True)),
        gives("the decay goes into the gradient (L2), where √v̂ divides it again: AdamW shrinks p itself",
              mistake(l2=True)),
        gives("no weight decay", mistake(decay=lambda case: 0.0)),
        gives("every parameter decays like the first: a program's row of the table says whose elements it has",
              mistake(decay=lambda case: np.full(case["p"].size, case["decays"][0]))),
        gives("a block that goes over a parameter's end decays like the parameter in which it begins: the pieces are "
              "cut anew from where each parameter begins, and its last one is shorter", mistake(decay=decay_by_block)),
        gives("m and v are forgotten from step to step: the kernel must store them",
              mistake(after=lambda m, v: (0 * m, 0 * v))),
        gives("m is forgotten from step to step: the kernel must store it", mistake(after=lambda m, v: (0 * m, v))),
        gives("v is forgotten from step to step: the kernel must store it", mistake(after=lambda m, v: (m, 0 * v))),
        *(gives("m and v are one array (m = v = … gives it two names): what is stored last is read as both",
                mistake(after=after)) for after in (lambda m, v: (v, v), lambda m, v: (m, m))),
        gives("v takes the gradient's size, not its square", mistake(square=np.abs)),
        gives("the decay comes after the step: p ← p · (1 - lr · λ) is first", mistake(decay_after=True)),
        when("right by itself, and wrong where another optimizer, of other parameters, makes steps in between: what "
             "belongs to one, its table, decays and lr, lies on the object (self), not on the class or in a global",
             lambda case, got: case["by_turns"]),
        when("p stays as it was: the new values must be stored", lambda case, got:
             np.array_equal(got["p"], np.broadcast_to(case["p"], got["p"].shape))),
    ]
    demands = [
        LAUNCHED,
        demand(lambda case: f"right, but with a launch for each of the {len(case['ends'])} parameters. A launch takes "
                            "some 5 µs, longer than the update of a bias: put the programs of all into one grid",
               lambda case, got: got["launches"] != len(case["ends"]) * len(case["grads"]) or len(case["ends"]) < 3),
        demand("right, but in more than one launch per step: m, v and p can be updated while all of them are in "
               "registers", lambda case, got: got["launches"] == len(case["grads"])),
        demand("right, but it moves more than 28 bytes per parameter: p, g, m and v are read once, and p, m and v "
               "written once; what was just stored is still in a register",
               lambda case, got: got["bytes_read"] + got["bytes_written"] <= len(case["grads"]) * (
                   28 * case["p"].size + 32 * (case["p"].size // case["settings"]["block"] + len(case["ends"])))),
        demand(lambda case, got: f"right, but a program has {got['lanes']} lanes, and works on no more than "
                                 f"{case['settings']['block']} elements, which is `block`: the others wait",
               lambda case, got: got["lanes"] <= case["settings"]["block"]),
        *BY_KERNELS,
    ]

    def cases(self, rng, ranks):
        found = []
        for ends, block, more in (((21, 31, 45), 16, {}), ((16, 21), 8, {"betas": (0.7, 0.9), "eps": 0.1, "lr": 0.05}),
                                  ((33,), 32, {"lr": 0.02}), ((1500, 1510, 1900), 1024, {"lr": 0.01})):
            n = ends[-1]
            p = rng.standard_normal(n) + np.sign(rng.standard_normal(n))
            decays = rng.uniform(0.5, 3, len(ends))
            decays[1:2] = 0
            found.append({"p": p.astype(np.float32), "grads": (rng.standard_normal((3, n)) + 0.5).astype(np.float32),
                          "ends": list(ends), "decays": [float(value) for value in decays],
                          "settings": {"block": block, "lr": 0.03} | more, "by_turns": not found})
        return found

    def truth(self, case):
        return {"p": adamw(case), "grads": case["grads"], "memory": NO_HARM}

    def picture(self, runs, path):
        case, got = runs[1][-1]
        passes = counted(numpy_adam, *np.abs(case["p"][None].repeat(4, axis=0)))
        return bars(path, "Adam", passes, got, len(case["grads"]) * case["p"].size)
