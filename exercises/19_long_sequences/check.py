"""What the answers of chapter 19 are tried with, and the mistakes that are known."""

import numpy as np

from exercises.frame import Check, demand

from . import choosing, drawing, halves, mischoices, misslices, mistakes, rings, slicing, softmaxes, training
from .softmaxes import INF, draw

BLOCK, QUERIES, SIZE = 16, 256, 4       # of what memory is measured with
BLOCKS = [4, 8, 16, 32]
NUMBER = 8      # bytes


def memory_case():
    return {"what": "memory", "block": BLOCK, "queries": QUERIES, "size": SIZE, "blocks": BLOCKS}


def growth(got):
    """Bytes that a block of keys more takes."""
    return (got["pieces"][-1] - got["pieces"][-2]) / (BLOCKS[-1] - BLOCKS[-2])


def measured(predicate):
    """A demand on the case in which memory is measured."""
    return lambda case, got: case["what"] != "memory" or predicate(got)


def memory_demands(kept, allowed):
    """kept: what may have been kept of each block; allowed: how many bytes per block may be, for copies of keys."""
    scores = QUERIES * BLOCK * NUMBER

    def grown(got):
        return f"{growth(got):,.0f} bytes more for every {BLOCK} keys more, with {QUERIES} queries"
    return [
        demand(lambda case, got: f"right, but the scores of all keys are held at once: {grown(got)}. Take a block of "
                                 "keys at a time, from the product on",
               measured(lambda got: growth(got) < 0.75 * scores)),
        demand(lambda case, got: f"right, but {kept}: {grown(got)}. That grows with the sequence as well, if more "
                                 "slowly than all scores", measured(lambda got: growth(got) <= allowed)),
        demand(lambda case, got: f"right, but it holds {max(got['pieces']):,} bytes, with {QUERIES} queries and "
                                 f"block={BLOCK}: one block's scores are {scores:,}. Are the blocks longer than asked "
                                 "for?", measured(lambda got: max(got["pieces"]) <= 12 * scores)),
    ]


# ---------------------------------------------------------------- 19.1

HIGH = 3000.0


class Attention(Check):
    exercise = "19.1"
    signatures = mistakes.FORWARD
    demands = memory_demands("the mask of all keys, or every block's own result, is kept until the end, or the "
                             "blocks are the queries'", 3 * 2 ** 10)

    def cases(self, rng, ranks):
        attends = [{"what": "attend"} | draw(rng, **how) for how in (
            {}, {"heads": 1, "queries": 5, "keys": 3}, {"level": HIGH}, {"level": -HIGH}, {"level": HIGH * 1j})]
        attends += [{"what": "attend"} | softmaxes.draw_hidden_above(rng),
                    {"what": "attend"} | softmaxes.one_key(draw(rng))]
        merges = [{"what": "merge", "one": softmaxes.pieces(rng, one), "other": softmaxes.pieces(rng, other)}
                  for one, other in [(rng.normal(2, 1, (2, 5)), rng.normal(1, 1, (2, 5))),
                                     ([[3.5, -INF, -1.25]], [[-INF, 0.5, 0.75]]),
                                     ([[1.5, -INF]], [[0.25, -INF]]),
                                     ([[HIGH, HIGH, -HIGH, 1 - HIGH]], [[HIGH + 1, -HIGH, HIGH, -HIGH]])]]
        wholes = []
        for keys, block, before, how in ((7, 3, 0, {"slope": 6.0}), (8, 4, 5, {"slope": -6.0}), (9, 64, 4, {}),
                                         (11, 2, 3, {"slope": 3.0, "heads": 3}), (10, 4, 0, {"level": HIGH}),
                                         (10, 4, 0, {"level": -HIGH}), (7, 2, 0, {"level": HIGH * 1j})):
            case = draw(rng, keys=keys + before, **how)
            cut = {name: case[name][..., :before, :] for name in ("k", "v")}
            more = softmaxes.exact(case["q"], cut["k"], cut["v"], case["q_at"], case["k_at"][:before])[:2]
            case |= {"k": case["k"][:, before:], "v": case["v"][:, before:], "k_at": case["k_at"][before:]}
            wholes.append({"what": "attention", **case, "block": block, "before": list(more) if before else None})
        unseen = [{"what": "attention", **softmaxes.hide(draw(rng, keys=keys), hidden), "block": 3, "before": None}
                  for keys, hidden in ((11, 3), (5, 5))]      # some of them, and all
        above = {"what": "attention", **softmaxes.draw_hidden_above(rng, keys=9), "block": 4, "before": None}
        return [*attends, *merges, *wholes, *unseen, above, memory_case()]

    def truth(self, case):
        return mistakes.truth(case)

    def picture(self, runs, path):
        return drawing.memory(*runs[1][-1], path)


# ---------------------------------------------------------------- 19.2

class Gradient(Check):
    exercise = "19.2"
    signatures = mistakes.GRADIENT
    demands = [
        demand(lambda case, got: f"right, but {' and '.join(got['changed'])} isn't what it was before the call: work "
                                 "on a copy", lambda case, got: not got.get("changed")),
        *memory_demands("the mask of all keys, or every block's own share of dq, is kept until the end", 4 * 2 ** 10)]

    def cases(self, rng, ranks):
        found = []
        for what, keys, mine, how in (
                ("weights", 7, (0, 7), {}), ("weights", 9, (3, 8), {}), ("weights", 8, (0, 8), {"future": 2000.0}),
                ("backward", 7, (0, 7), {}), ("backward", 11, (4, 11), {}), ("backward", 9, (2, 6), {"heads": 3}),
                ("backward", 8, (0, 8), {"level": HIGH}), ("backward", 8, (0, 8), {"future": 2000.0}),
                ("backward", 11, (0, 11), {"hidden": 3})):
            hidden = how.pop("hidden", None)
            case = draw(rng, keys=keys, **how)
            case = softmaxes.hide(case, hidden) if hidden else case
            out, lse = softmaxes.exact(*case.values())[:2]
            found.append({"what": what, **case, "out": out, "lse": lse, "dout": rng.standard_normal(out.shape),
                          "mine": list(mine), "block": 3})
        return [*found, memory_case()]

    def truth(self, case):
        return mistakes.gradients(case)


# ---------------------------------------------------------------- 19.3

class Ring(Check):
    exercise = "19.3"
    signatures = rings.SIGNATURES
    demands = rings.DEMANDS

    def cases(self, rng, ranks):
        return [rings.draw(rng, ranks, time=4, heads=2, size=3, width=5, passes=2, slope=2.0),
                rings.draw(rng, ranks, time=3, heads=1, size=5, width=2, passes=2, in_order=False, slope=-3.0,
                           last_first=False),
                # No MPI library copies so long messages aside.
                rings.draw(rng, ranks, time=8, heads=1, size=2501, width=2500, passes=1)]

    def truth(self, case):
        return rings.truth(case)

    def picture(self, runs, path):
        return drawing.ring(*runs[max(runs)][-1], path)


# ---------------------------------------------------------------- 19.4

def trained(case):
    return case[0]["what"] == "training"


def failures(got):
    return [rank["failed"] for rank in got if "failed" in rank]


def together(case, got):
    """How far the ranks' losses are from the library's, of whole sequences; inf where there are none."""
    if failures(got):
        return np.inf
    return max(np.abs(np.subtract(rank["losses"], training.of_library(case[0]))).max() for rank in got)


def products_of(case, got, way):
    """[[products of parts in each step of the ring] for each rank], of the first attention."""
    n, part = len(got), case[0]["model"]["length"] // (2 * len(got))
    return [[pairs / part ** 2 for pairs in rank["work"][way][:n]] for rank in got]


def balanced(case, got):
    return all(sum(of_rank) <= 2 * len(got) + 1 for way in ("forward", "backward")
               for of_rank in products_of(case, got, way))


class Zigzag(Check):
    exercise = "19.4"
    integers = ("positions",)
    signatures = halves.SIGNATURES
    demands = [
        *halves.DEMANDS,
        demand(lambda case, got: f"all right by itself, but not in a training run: {failures(got)[0]}",
               lambda case, got: not trained(case) or not failures(got)),
        demand(lambda case, got: "all right by itself, but a GPT trained with it leaves the library's curve, by "
                                 f"{together(case, got):.1g}: are the ring's and the halves' functions asked for the "
                                 "same positions?", lambda case, got: not trained(case) or together(case, got) < 1e-9),
        demand(lambda case, got: f"right, but some rank has more than 2N + 1 = {2 * len(got) + 1} products of parts in "
                                 "a round of the ring", lambda case, got: not trained(case) or balanced(case, got)),
    ]

    def cases(self, rng, ranks):
        return [*halves.cases(rng, ranks), [training.draw(rng, ranks)] * ranks]

    def truth(self, case):
        return halves.of_each(case, halves.truth)

    def picture(self, runs, path):
        case, got = runs[max(runs)][-1]
        return drawing.balance(products_of(case, got, "forward"), got[0]["losses"], training.of_library(case[0]), path)


# ---------------------------------------------------------------- 19.5

class Blocks(Check):
    exercise = "19.5"
    signatures = mischoices.SIGNATURES
    demands = mischoices.DEMANDS

    def cases(self, rng, ranks):
        return choosing.cases(rng)

    def truth(self, case):
        return choosing.truth(case)

    def picture(self, runs, path):
        case, got = runs[1][-1]
        return drawing.choice(case, got, mischoices.curves(case), path)


# ---------------------------------------------------------------- 19.6

class Slices(Check):
    exercise = "19.6"
    signatures = misslices.SIGNATURES
    demands = misslices.DEMANDS

    def cases(self, rng, ranks):
        return slicing.cases(rng)

    def truth(self, case):
        return slicing.truth(case)

    def picture(self, runs, path):
        return drawing.slices([run for run in runs[1] if run[0]["what"] == "memory"], path)
