"""What the answers of chapter 26 are tried with, and the mistakes that are known."""

import numpy as np

from exercises.frame import Check, demand, gives, when
from exercises.frame.kernels import BY_KERNELS, LAUNCHED, NO_HARM, both, harm, is_out

from . import blockwise, drawing, gradients, products
from .blockwise import (
    IN_BYTES,
    TF32,
    all_there_are,
    anything,
    begun,
    forward,
    grid_turned,
    mostly_outside,
    multiplied_at_most,
    nearly,
    walked,
    wrong,
    wrong_lse,
)

ONE_LAUNCH = demand("right, but in more than one launch", lambda case, got: got["launches"] == 1)


def out(f):
    """Of f(case), the product that a mistake gives, outputs; None of None."""
    def found(case):
        product = f(case)
        return None if product is None else {"out": product}
    return found


def is_product(f):
    """A predicate: out is f(case), but for the rounding of long sums."""
    return is_out("out", f, atol=1e-4)


def everywhere_nan(name):
    return lambda case, got: bool(np.isnan(got[name]).all())


# ---------------------------------------------------------------- 26.1

class Matmul(Check):
    exercise = "26.1"
    tolerance = 1e-5
    signatures = [
        gives("k is rounded down to whole blocks: the last columns of x and rows of y, fewer than DEPTH, are left out. "
              "The mask and `other` make it right to go beyond", out(products.whole_blocks)),
        gives("the first block of depth alone: the loop must go along all of k", out(products.first_block)),
        gives("the last block of depth alone: what the loop finds is to be added up, and each turn begins anew",
              out(products.last_block)),
        *(gives(f"blocks of depth begin as far apart as {name} of a tile: DEPTH is a number of its own",
                out(products.steps_of(number))) for number, name in enumerate(("rows", "columns"))),
        gives("the grid is rounded down: where a tile isn't filled, at the lower and the right edge, nobody works",
              out(products.rounded_down)),
        gives("the grid is turned: its first number counts tiles downwards, and tl.program_id(0) goes with it",
              out(products.grid_turned)),
        when("all programs work on the first tile: its rows begin at tl.program_id(0) * ROWS, its columns at "
             "tl.program_id(1) * COLUMNS", both(is_product(products.first_tile),
                                                lambda case, got: harm(got, "two programs") > 0)),
        *(when(f"the steps of {names} are in bytes: strides are, but pointers in a kernel count elements. Divide by "
               "itemsize", is_product(products.with_steps(*names.split(" and "), way=products.in_bytes)))
          for names in ("x and y and out", "x", "y", "out")),
        *(when(f"the two steps of {name} are swapped: strides[0] leads from row to row, strides[1] from column to "
               "column", is_product(products.with_steps(name, way=products.swapped))) for name in ("x", "y", "out")),
        *(when(f"{names} {'is' if len(names) < 4 else 'are'} taken to lie row behind row, without a gap: a transpose, "
               "or some columns of a wider matrix, doesn't. Each array has two steps",
               is_product(products.with_steps(*names.split(" and "), way=products.contiguous)))
          for names in ("x and y and out", "x and y", "x", "y", "out")),
        when("pointers go DEPTH elements further in the loop, of x and of y alike: it is DEPTH columns of x, and DEPTH "
             "rows of y, each times its step", is_product(products.walked_alike)),
        when("padded lanes are undefined: behind k a masked load without `other` gives anything, and tl.dot adds it to "
             "every element of the tile. 0 adds nothing",
             lambda case, got: everywhere_nan("out")(case, got) and harm(got, "outside") == 0
             and products.sizes(case)[2] % products.block_of(case)[2] > 0),
        when("every element of out is written, and none is a number: does the kernel add to what lies in out, which "
             "may be anything? The sum begins on the chip", lambda case, got: everywhere_nan("out")(case, got)
             and not harm(got, "outside") and not got["unwritten"]["out"]),
        gives(TF32, out(products.in_tf32)),
        gives("the factors are rounded to 16 bits on the way: they are float32, and stay so", out(products.in_half)),
        when("the store has no mask, or one that lets too much through: what lies behind out's edges is overwritten",
             lambda case, got: harm(got, "written outside") > 0 and not harm(got, "read outside")),
        when("a load goes beyond an edge of x or y: rows end at m, columns at n, and what is between them at k. Each "
             "load has two edges", lambda case, got: harm(got, "read outside") > 0),
        when("each array has steps of its own, for rows and for columns: x may be a transpose, whose columns lie far "
             "apart and whose rows are neighbours",
             lambda case, got: case["steps"] != {}),
    ]
    demands = [
        LAUNCHED, ONE_LAUNCH,
        demand("right, but not by tl.dot, or not all of it: tensor cores, most of what a GPU can compute, multiply "
               "tiles and do nothing else", lambda case, got: got["multiplied"] >= np.prod(products.sizes(case))),
        demand(lambda case, got: f"right, but a program works on {got['lanes']} elements of out, and `block` says "
                                 "{0} by {1}".format(*products.block_of(case)[:2]),
               lambda case, got: got["lanes"] <= np.prod(products.block_of(case)[:2])),
        demand(lambda case, got: f"right, but {got['idle']} of {got['programs']} programs have no element",
               lambda case, got: got["idle"] == 0),
        demand(lambda case, got: f"right, but {got['bytes_read']:,} bytes are loaded, and with these tiles "
                                 f"{products.bytes_at_most(case):,} are enough: of x a strip for each tile to the "
                                 "right, of y one for each tile downwards; masked lanes load nothing",
               lambda case, got: got["bytes_read"] <= products.bytes_at_most(case)),
        demand("right, but out is written more than once: the sum stays on the chip until it is complete",
               lambda case, got: got["bytes_written"] <= case["out"].nbytes),
        *BY_KERNELS,
    ]

    def cases(self, rng, ranks):
        found = []
        for (m, n, k), block, steps in (
                ((50, 70, 37), (16, 32, 16), {}),
                ((20, 35, 50), (16, 16, 32), {"x": (1, 23), "y": (38, 1), "out": (37, 1)}),
                ((20, 35, 50), (16, 16, 32), {}), ((64, 32, 48), (32, 32, 16), {}), ((1, 1, 1), (16, 16, 16), {}),
                ((45, 33, 20), None, {"x": (22, 1), "y": (1, 20), "out": (1, 47)}),
                *(((64, 64, 64), (size, size, 16), {}) for size in (16, 32, 64))):
            x, y = rng.standard_normal((m, k)) + 0.5, rng.standard_normal((k, n)) + 0.5
            found.append({"x": x.astype(np.float32), "y": y.astype(np.float32),
                          "out": np.full((m, n), np.nan, np.float32), "block": block, "steps": steps})
        return found

    def truth(self, case):
        return {"out": products.right_product(case), "x": case["x"], "y": case["y"], "memory": NO_HARM}

    def picture(self, runs, path):
        return drawing.tiles(path, runs[1][-3:])


# ---------------------------------------------------------------- 26.2

def queries_and_keys(rng, scale, *shape):
    """With a large scale, a power of 2, they are quarters, whose products float32 has exactly: however far scores lie
    apart, what the exponentials are of is right to the last bit. With one below 0 all of them are above 0."""
    if abs(scale) < 0.5:
        return rng.standard_normal((2, *shape))
    return rng.integers(2 if scale < 0 else -6, 9 if scale < 0 else 7, (2, *shape)) / 4


class Attention(Check):
    exercise = "26.2"
    tolerance = 2e-5
    signatures = [
        gives("neither sum is scaled down when a larger score comes: what has been added up so far was divided by "
              "exp of a smaller largest", wrong(keep_total=False, keep_found=False)),
        gives("the sum of exponentials isn't scaled down when a larger score comes, the values' sum is",
              wrong(keep_total=False)),
        gives("the values' sum isn't scaled down when a larger score comes, that of the exponentials is",
              wrong(keep_found=False)),
        gives("a softmax of each block by itself, and their mean: blocks weigh as their exponentials do, not alike",
              lambda case: {"out": forward(case, each_block=True)["out"]}),
        gives("not divided by the sum of exponentials", wrong(divided=False)),
        gives("divided by the sum in each block, and then scaled and added to as if it weren't: once, behind the last",
              wrong(divided="in each block")),
        gives("a query sees itself, too: keys up to its own position, <= and not <",
              wrong(seen=lambda rows, places, *_: places < rows)),
        *(gives("not causal: of its own block a query sees what comes later", wrong(seen=seen))
          for seen in (all_there_are, anything)),
        *(gives("not causal: every query sees all keys", wrong(seen=seen, last=lambda *sizes: sizes[-1]))
          for seen in (all_there_are, anything)),
        gives("positions are counted from the beginning of the block: the first query of the second block isn't query "
              "0", wrong(seen=lambda rows, places, first, place, time: places - place <= rows - first)),
        gives("the scores aren't multiplied by `scale`", wrong(scale=lambda case: 1.0)),
        gives("scores are divided by √size, whatever `scale` says",
              wrong(scale=lambda case: case["q"].shape[2] ** -0.5)),
        gives("scores are divided by √size as well: `scale` is all that they are multiplied by",
              wrong(scale=lambda case: case["scale"] * case["q"].shape[2] ** -0.5)),
        gives("scores are multiplied by `scale` twice", wrong(scale=lambda case: case["scale"] ** 2)),
        gives("the loop ends where these queries begin: they see keys of their own block, too",
              wrong(last=lambda first, queries, sources, time: first)),
        gives("the loop ends with the block of the first of these queries: the last one sees further",
              wrong(last=lambda first, queries, sources, time: first + 1)),
        gives("the loop goes over as many blocks of keys as there are blocks of queries up to here: the two have sizes "
              "of their own", wrong(last=lambda first, queries, sources, time: (first // queries + 1) * sources)),
        gives("the keys of head 0 are taken by all: keys and values have heads of their own",
              blockwise.of_head_0("keys_of")),
        gives("the queries of head 0 are taken by all: tl.program_id(1) says which head a program has",
              blockwise.of_head_0("queries_of")),
        gives("scores that aren't seen become 0: exp(0 - largest) is a weight, too. exp(-inf) is none",
              wrong(unseen=0.0)),
        gives("the largest stays -inf: what has been added up is forgotten with each block, and the last one is left",
              wrong(replaced=False)),
        gives("keys are taken for values", wrong(values="k")),
        gives("powers of 2 in the place of e's: exp(x) is exp2(x · log₂ e)", wrong(base=np.exp2)),
        gives("lse is the sum of exponentials: it wants the logarithm, and the largest added",
              wrong_lse(lambda largest, total: total)),
        when("lse lacks the largest, which has been subtracted from every score",       # perhaps 0 but for rounding
             is_out("lse", lambda case: forward(case, of_lse=lambda largest, total: np.log(total))["lse"], atol=1e-5)),
        gives("lse is the largest score: the logarithm of the sum is to be added to it",
              wrong_lse(lambda largest, total: largest)),
        gives("lse lacks the logarithm of the sum", wrong_lse(lambda largest, total: largest + total)),
        gives("lse is a logarithm of base 2: backward takes e's", wrong_lse(
            lambda largest, total: (largest + np.log(total)) / np.log(2))),
        gives("of lse the largest is natural, and the sum's logarithm of base 2", wrong_lse(
            lambda largest, total: largest + np.log2(total))),
        gives("the largest begins at 0: where all scores lie far below, exp gives 0, and 0 / 0 is nan. Nothing is "
              "smaller than -inf", blockwise.float32_underflow),
        when("the largest isn't subtracted: exp(89) is more than float32 holds, and inf / inf is nan",
             blockwise.overflown),
        when("each array has steps of its own, from head to head and from position to position",
             lambda case, got: case["steps"] != {}),
        when(IN_BYTES, mostly_outside),
        when(TF32, nearly(forward, 2e-3)),
        when("the grid is rounded down: the last queries, fewer than a block, have no program",
             begun(lambda time, queries, sources: time // queries * queries)),
        when("the grid counts blocks of keys: its programs have queries, cdiv(time, QUERIES) blocks of them",
             begun(lambda time, queries, sources: -(-time // sources) * queries)),
        when("the grid is turned: its first number counts blocks of queries, and tl.program_id(0) goes with it",
             grid_turned(forward, "out", 0)),
        when("lse is never written, or only in part", lambda case, got: np.isnan(got["lse"]).any()
             and not np.isnan(got["out"]).any()),
        when("one program per block alone: the grid's second number is the heads, and tl.program_id(1) says which",
             lambda case, got: len(case["q"]) > 1 and np.isnan(got["out"][1:]).all() and not np.isnan(
                 got["out"][0]).any()),
        when("padded lanes are undefined: the weight of a key behind the end is 0, but 0 · nan is nan. `other=0.0` for "
             "keys and values", lambda case, got: np.isnan(got["out"]).any() and harm(got, "outside") == 0
             and case["q"].shape[1] % blockwise.block_of(case)[1] > 0),
        when("a store goes beyond the last position: its mask is position < time, of out and of lse",
             lambda case, got: harm(got, "written") > 0),
        when("a load goes beyond the last position: queries and keys end at `time`",
             lambda case, got: harm(got, "read outside") > 0),
    ]
    demands = [
        LAUNCHED, ONE_LAUNCH,
        demand("right, but not by tl.dot, or not all of it: both products, of queries and keys and of weights and "
               "values, are tensor cores' work",
               lambda case, got: got["multiplied"] >= case["q"].size * case["q"].shape[1]),
        demand(lambda case, got: f"right, but {got['bytes_written']:,} bytes are written, and out and lse have "
                                 f"{case['out'].nbytes + case['lse'].nbytes:,}: what lies between stays on the chip",
               lambda case, got: got["bytes_written"] <= case["out"].nbytes + case["lse"].nbytes),
        demand(lambda case, got: f"right, but a program has {got['lanes'] // case['q'].shape[2]} queries, and `block` "
                                 f"says {blockwise.block_of(case)[0]}",
               lambda case, got: got["lanes"] <= blockwise.block_of(case)[0] * case["q"].shape[2]),
        demand(lambda case, got: f"right, but {got['bytes_read']:,} bytes are loaded, and {most_read(case):,} are "
                                 "enough for these blocks: queries once, keys and values once per block of queries, "
                                 "and no block of which nothing is seen",
               lambda case, got: got["bytes_read"] <= most_read(case)),
        demand("right, but blocks of keys of which these queries see nothing are multiplied: end the loop before "
               "them, and at `time`",
               lambda case, got: got["multiplied"] <= multiplied_at_most(case, 2)),
        *BY_KERNELS,
    ]

    def cases(self, rng, ranks):
        found = []
        for (heads, time, size), block, scale, steps in (
                ((2, 70, 16), (16, 32), 0.5, {}), ((2, 70, 16), (32, 16), 0.5, {}),
                ((3, 50, 16), (32, 16), 0.25, {"q": (16, 50, 1), "k": (17, 53, 1), "v": (20, 60, 1),
                                               "out": (18, 64, 1)}),
                ((1, 1, 16), (16, 16), 2.0, {}), ((2, 48, 32), (16, 16), 8.0, {}), ((1, 40, 16), (16, 16), -8.0, {}),
                ((2, 45, 64), None, 0.0625, {}), *(((1, time, 16), (32, 32), 0.25, {}) for time in (64, 128, 256))):
            q, k = queries_and_keys(rng, scale, heads, time, size)
            v = rng.standard_normal((heads, time, size))
            found.append({"q": q.astype(np.float32), "k": k.astype(np.float32), "v": (v + 0.5).astype(np.float32),
                          "out": np.full((heads, time, size), np.nan, np.float32),
                          "lse": np.full((heads, time), np.nan, np.float32), "scale": scale, "block": block,
                          "steps": steps})
        return found

    def truth(self, case):
        return {**forward(case), **{name: case[name] for name in ("q", "k", "v")}, "memory": NO_HARM}

    def picture(self, runs, path):
        return drawing.bytes_by_length(path, runs[1][-3:])


def most_read(case):
    heads, time, size = case["q"].shape
    return 4 * heads * size * (time + 2 * walked(case))


# ---------------------------------------------------------------- 26.3

def read_by_both(case):
    """Of q, out_bar and out a block of queries' own, lse; keys and values along the way. Of keys and values the other
    kernel's own; q, out_bar, lse and D along the way."""
    heads, time, size = case["q"].shape
    there = walked(case, by_queries=True)
    return 4 * heads * (size * (3 * time + 2 * walked(case)) + time + size * (2 * time + 2 * there) + 2 * there)


def too_wide(case, got):
    """(the kernel, its programs' queries or keys, how many `block` says), of the first kernel that has more."""
    of_launches, size = got["lanes_of_launches"], case["q"].shape[2]
    for name, lanes, most in zip(("first", "second"), of_launches, blockwise.block_of(case), strict=False):
        if len(of_launches) == 2 and lanes > most * size:
            return name, lanes // size, most
    return None


class AttentionBackward(Check):
    exercise = "26.3"
    tolerance = 3e-5
    signatures = gradients.MISTAKES
    demands = [
        LAUNCHED,
        demand("right, but not by tl.dot, or not all of it: five products, two of which both kernels make",
               lambda case, got: got["multiplied"] >= 7 * case["q"].size * (case["q"].shape[1] + 1) // 2),
        demand("right, but in more than two launches", lambda case, got: got["launches"] <= 2),
        demand(lambda case, got: f"right, but {got['idle']} of {got['programs']} programs have no element: one "
                                 "kernel's grid has blocks of queries, the other's blocks of keys",
               lambda case, got: got["idle"] == 0),
        demand(lambda case, got: f"right, but {got['bytes_written']:,} bytes are written, and the three gradients and "
                                 f"D have {made_bytes(case):,}: sums stay on the chip until they are complete",
               lambda case, got: got["bytes_written"] <= made_bytes(case)),
        demand(lambda case, got: f"right, but {got['bytes_read']:,} bytes are loaded, and {read_by_both(case):,} are "
                                 "enough for these blocks, if no block is loaded of which nothing is seen",
               lambda case, got: got["bytes_read"] <= read_by_both(case)),
        demand(lambda case, got: "right, but a program of the {} launch has {} positions, and `block` says {}".format(
            *too_wide(case, got)),
               lambda case, got: too_wide(case, got) is None),
        demand("right, but blocks are multiplied of which nothing is seen: a loop along the keys ends behind the last "
               "of these queries, one along the queries begins at the first of these keys",
               lambda case, got: got["multiplied"] <= multiplied_at_most(case, 3, 4)),
        *BY_KERNELS,
    ]

    def cases(self, rng, ranks):
        found = []
        for (heads, time, size), block, scale, step in (
                ((2, 50, 16), (16, 32), 0.5, None), ((1, 70, 16), (32, 16), 0.5, None),
                ((2, 70, 16), (32, 16), 0.25, (16, 90, 1)), ((1, 3, 16), (16, 16), 0.25, None),
                ((1, 112, 32), (16, 16), 1.0, None), ((1, 33, 16), None, 0.25, None)):
            q, k = queries_and_keys(rng, scale, heads, time, size).astype(np.float32)
            v, bar = (rng.standard_normal((2, heads, time, size)) + 0.3).astype(np.float32)
            case = {"q": q, "k": k, "v": v, "scale": scale, "block": block}
            forth = forward(case)
            names = ("q", "k", "v", "out", "out_bar", "q_bar", "k_bar", "v_bar")
            found.append({"q": q, "k": k, "v": v, "out": forth["out"].astype(np.float32),
                          "lse": forth["lse"].astype(np.float32), "out_bar": bar,
                          **{name: np.full_like(q, np.nan) for name in ("q_bar", "k_bar", "v_bar")},
                          "D": np.full((heads, time), np.nan, np.float32), "scale": scale, "block": block,
                          "steps": {} if step is None else dict.fromkeys(names, step)})
        return found

    def truth(self, case):
        unchanged = {name: case[name] for name in ("q", "k", "v", "out", "lse", "out_bar")}
        return {**gradients.backward(case), **unchanged, "memory": NO_HARM}


def made_bytes(case):
    return 3 * case["q"].nbytes + case["D"].nbytes
