"""What the answers of chapter 8 are tried with, and the mistakes that are known."""

import itertools

import numpy as np

from exercises.frame import Check, demand, gives, when

from .regression import (
    INPUTS,
    OUTPUTS,
    STEPS,
    differences_stay,
    everybody_on_everything,
    nobody_averages,
    not_moved,
    own_losses,
    together,
    weighed,
)

# ---------------------------------------------------------------- 08.1

SIZES, EPOCHS = (1, 2, 3, 4), (0, 1)
# By which a seed may be multiplied before the epoch is added, or an epoch before the seed is; an epoch also by more.
FACTORS = *range(2, 41), 100, 128, 256, 1000, 1024, 10_000
LARGER = *(2 ** k for k in range(11, 32)), *(10 ** k for k in range(5, 10)), 997, 1009, 7919, 9973, 10_007, 12_345, \
    123_456, 1_000_003, 1_000_007, 1_000_000_007


def batches(case, got, size, epoch=0, seed=None):
    """[[part of rank 0, part of rank 1, …] per batch] of what was returned."""
    seed = case["seed"] if seed is None else seed
    mine = [twice[0] for call, twice in zip(case["calls"], got["parts"], strict=True)
            if (call["size"], call["epoch"], call["seed"]) == (size, epoch, seed)]
    return [list(parts) for parts in zip(*mine, strict=True)]


def united(case, got, size, epoch=0, seed=None):
    """The batches as sorted lists, all ranks together."""
    return [sorted(np.concatenate(parts).tolist()) for parts in batches(case, got, size, epoch, seed)]


def well_formed(case, got):
    steps = -(-case["n"] // case["batch_size"])
    return all(isinstance(parts, list) and len(parts) == steps
               and all(isinstance(part, np.ndarray) and part.ndim == 1 and part.dtype.kind in "iu" for part in parts)
               for twice in got["parts"] for parts in twice)


def same_when_repeated(case, got):
    return all(np.array_equal(a, b) for first, second in got["parts"] for a, b in zip(first, second, strict=True))


def rows_held(case, got, size):
    """The rows that the ranks hold together in an epoch."""
    return sum(len(part) for parts in batches(case, got, size) for part in parts)


def wrong_lengths(case, got):
    """Those of some epoch's global batches, or None."""
    steps = range(case["batch_size"], case["n"], case["batch_size"])
    right = [len(batch) for batch in np.split(np.arange(case["n"]), steps)]
    found = (list(map(len, united(case, got, 1, epoch, seed))) for seed, epoch in pairs(case["seed"], case["n"]))
    return next((lengths for lengths in found if lengths != right), None)


def divided(case, got):
    return any(len(part) < case["batch_size"] for part in batches(case, got, 3)[0])


def not_too_many(case, got):
    return all(rows_held(case, got, size) <= case["n"] for size in SIZES)


def not_too_few(case, got):
    return all(rows_held(case, got, size) >= case["n"] for size in SIZES)


def complete(case, got):
    return all(sorted(sum(united(case, got, size), [])) == list(range(case["n"])) for size in SIZES)


def the_batches_of_one_rank(case, got):
    return all(united(case, got, size) == united(case, got, 1) for size in SIZES)


def balanced(case, got):
    return all(max(map(len, parts)) - min(map(len, parts)) <= 1 for size in SIZES
               for parts in batches(case, got, size))


def pairs(seed, n):
    """(seed, epoch) that have orders of their own, though some sum or product of both numbers is the same, or their
    digits one behind the other are, or the epoch is one in which a rotation of n samples has come round."""
    return list(dict.fromkeys([*itertools.product((seed, seed + 1), EPOCHS), (2 * seed, 0), (2 * seed + 1, 0),
                               *((seed, factor) for factor in FACTORS),
                               *((seed + factor, 0) for factor in FACTORS + LARGER), (1, 11), (11, 1), (seed, n)]))


def several(case):
    """Whether there is more than one batch, so that orders can be told apart by their batches."""
    return case["n"] > case["batch_size"]


def shared_order(case, got):
    """Two pairs ((seed, epoch), (seed, epoch)) with the same batches, or None."""
    if not several(case):
        return None
    found = [(pair, united(case, got, 1, pair[1], pair[0])) for pair in pairs(case["seed"], case["n"])]
    return next(((one, other) for (one, batches_of_one), (other, batches_of_other) in itertools.combinations(found, 2)
                 if batches_of_one == batches_of_other), None)


def told_apart(case, got):
    (seed, epoch), (other_seed, other_epoch) = shared_order(case, got)
    if seed == other_seed:
        return (f"the order comes back: with seed {seed} epoch {other_epoch} has the batches of epoch {epoch}. Each "
                "epoch has an order of its own")
    return ("seed and epoch are mixed into one number, as seed + epoch, seed · (epoch + 1), 31 · seed + epoch or the "
            f"digits of both do, or they are sorted: seed {seed} in epoch {epoch} has the order of seed {other_seed} "
            f"in epoch {other_epoch}. Two runs with these seeds would train on the same batches, epochs apart; the "
            "order must depend on both numbers, each for itself")


class Shard(Check):
    exercise = "08.1"

    def cases(self, rng, ranks):
        found = []
        for n, batch_size in ((61, 16), (29, 7), (24, 8), (int(rng.integers(30, 60)), int(rng.integers(9, 13))), (6, 8),
                              (7, 7)):
            seed = 2 * int(rng.integers(1, 500))       # even, so that seed ^ epoch shows as well
            calls = [{"rank": rank, "size": size, "seed": seed, "epoch": epoch}
                     for size in SIZES for epoch in EPOCHS for rank in range(size)]
            calls += [{"rank": 0, "size": 1, "seed": other, "epoch": epoch} for other, epoch in pairs(seed, n)
                      if other != seed or epoch not in EPOCHS]
            found.append({"n": n, "batch_size": batch_size, "seed": seed, "calls": calls})
        return found

    def truth(self, case):
        return {}     # many orders are right: the demands say what makes one so

    demands = [
        demand(lambda case: f"the result isn't a list of {-(-case['n'] // case['batch_size'])} int arrays, one per "
                            f"global batch of {case['batch_size']} of {case['n']} samples", well_formed),
        demand("two calls with the same arguments give different samples: the order must depend on seed and epoch "
               "only, not on NumPy's global generator, nor on what is left from an earlier call", same_when_repeated),
        demand("every rank holds the whole batch: nothing is divided", divided),
        demand("the parts overlap: some sample is on two ranks in one step, and counts twice",
               not_too_many),
        demand("samples are left out: the parts together are shorter than the batch (who takes the rest of the "
               "division?)", not_too_few),
        demand("each rank shuffles for itself: the parts are as long as they should be, but cut from different orders, "
               "so that some samples come twice and others never", complete),
        demand("the global batches are others on several ranks than on one: cut the order into global batches first, "
               "and only then each batch into parts", the_batches_of_one_rank),
        demand(lambda case, got: f"the global batches of {case['n']} samples have {wrong_lengths(case, got)}: each "
                                 f"has {case['batch_size']}, and the last one what remains",
               lambda case, got: wrong_lengths(case, got) is None),
        demand("the parts are uneven: within a batch no rank may hold two samples more than another", balanced),
        demand("every epoch has the same order: the epoch doesn't enter into it",
               lambda case, got: not several(case) or united(case, got, 1, 0) != united(case, got, 1, 1)),
        demand("every seed gives the same order: the seed doesn't enter into it",
               lambda case, got: not several(case)
               or united(case, got, 1, 0) != united(case, got, 1, 0, case["seed"] + 1)),
        demand(told_apart, lambda case, got: shared_order(case, got) is None),
        demand("the samples aren't shuffled: the order is 0, 1, 2, …",
               lambda case, got: not several(case)
               or batches(case, got, 1)[0][0].tolist() != list(range(case["batch_size"]))),
    ]


# ---------------------------------------------------------------- 08.2

SHAPES = [(3, 5), (5,), (2, 1, 4), (5,)]        # two of them alike


def arrays(rng, scale=1.0):
    return [scale * rng.standard_normal(shape) for shape in SHAPES]


list_left = demand("right, but the list has lost arrays: it is the caller's, who goes on to use it. Go through it, and "
                   "leave it as it is", lambda case, got: all(g["left"] == len(SHAPES) for g in got))


def one_for_a_shape(name):
    """The signature of answers in which arrays of one shape have become one."""
    return when("arrays of one shape have become one: several parameters of a model may have the same shape, so "
                "what belongs to one is found by its place in the list, not by its shape",
                lambda case, got: all(np.any(g[name][1]) and np.array_equal(g[name][1], g[name][3]) for g in got))


class BroadcastParameters(Check):
    exercise = "08.2"
    same_bits = ("parameters",)
    signatures = [
        gives("each rank still has its own parameters: nothing was written into the arrays",
              lambda case: [{"parameters": rank["parameters"]} for rank in case]),
        gives("the parameters are the mean over the ranks: alike, but no rank's initial values (averaging {ranks} "
              "draws makes them √{ranks} times too small)",
              lambda case: [{"parameters": [sum(r["parameters"][i] for r in case) / len(case)
                                            for i in range(len(SHAPES))]}] * len(case)),
        gives("the parameters are the sum over the ranks, not rank 0's",
              lambda case: [{"parameters": [sum(r["parameters"][i] for r in case) for i in range(len(SHAPES))]}]
              * len(case)),
        gives("all ranks have the parameters of the last rank; rank 0's were asked for",
              lambda case: [{"parameters": case[-1]["parameters"]}] * len(case)),
        one_for_a_shape("parameters"),
    ]
    demands = [list_left,
               demand("the right values, but by messages from rank 0 to each: on N ranks it sends N-1 of them, one "
                      "after the other. broadcast hands on, in ⌈log₂N⌉ steps",
                      lambda case, got: not any({"send", "isend"} & set(g.ops()) for g in got)),
               demand("the right values, but by another way than broadcast, which is made for it: in a sum every rank "
                      "sends",
                      lambda case, got: all(set(g.ops()) <= {"broadcast"} for g in got)),
               demand(lambda case, got: f"right, but with {len(got[0].calls)} broadcasts of {len(SHAPES)} parameters: "
                                        "one for each is enough",
                      lambda case, got: all(len(g.calls) <= len(SHAPES) for g in got))]

    def cases(self, rng, ranks):
        return [[{"parameters": arrays(rng)} for _ in range(ranks)] for _ in range(2)]

    def truth(self, case):
        return [{"parameters": case[0]["parameters"]}] * len(case)


# ---------------------------------------------------------------- 08.3

def weighted(case, weight, divisor=lambda case: 1.0):
    """For every rank: Σ over the ranks of weight(rank's inputs) · gradient, over the divisor."""
    total = [sum(weight(r) * r["grads"][i] for r in case) / divisor(case) for i in range(len(SHAPES))]
    return [{"grads": total}] * len(case)


def samples(case):
    return sum(r["count"] for r in case)


def counts(case):
    return " and ".join([", ".join(str(r["count"]) for r in case[:-1]), str(case[-1]["count"])])


class AverageGradients(Check):
    exercise = "08.3"
    same_bits = ("grads",)
    signatures = [
        gives("the ranks' gradients were summed, not averaged: where the ranks hold equally many samples, every "
              "gradient is exactly {ranks}.000 times too large", lambda case: weighted(case, lambda r: 1)),
        gives(lambda case: f"mean of means: the ranks hold {counts(case)} samples, so their means don't weigh the same",
              lambda case: weighted(case, lambda r: 1, len)),
        gives("weighed by the samples, but nobody divided by the number of samples of all ranks",
              lambda case: weighted(case, lambda r: r["count"])),
        gives("divided twice: every gradient is {ranks} times too small",
              lambda case: weighted(case, lambda r: r["count"], lambda case: samples(case) * len(case))),
        gives("weighed by the samples, but divided by the number of ranks instead of the samples of all ranks",
              lambda case: weighted(case, lambda r: r["count"], len)),
        gives("each rank still has its own gradients: nothing was exchanged, or the result wasn't written into the "
              "arrays (grad = … only gives the name to another array, and grads[i] = … puts one into the list)",
              lambda case: [{"grads": r["grads"]} for r in case]),
        gives("weighed after the sum: each rank multiplies the sum of all means by its own share. Every mean must be "
              "multiplied by its own rank's share, before the sum",
              lambda case: [{"grads": [g * r["count"] / samples(case) for g in summed["grads"]]}
                            for r, summed in zip(case, weighted(case, lambda r: 1), strict=True)]),
        gives("each rank weighed its own gradients, but nothing was exchanged",
              lambda case: [{"grads": [g * r["count"] / samples(case) for g in r["grads"]]} for r in case]),
        gives("each rank divided its own gradients, but nothing was exchanged",
              lambda case: [{"grads": [g / len(case) for g in r["grads"]]} for r in case]),
        one_for_a_shape("grads"),
    ]
    demands = [list_left,
               demand("right, but with more messages than needed: one all_reduce per gradient, and one for the count",
                      lambda case, got: all(len(g.calls) <= len(SHAPES) + 1 for g in got))]

    def cases(self, rng, ranks):
        uneven = rng.permutation([8, 3, 5, 1])[:ranks]
        none = rng.permutation([6, 0, 2, 4])[:ranks] if ranks > 1 else [4]
        return [[{"grads": arrays(rng, 10.0 if count else 0.0), "count": int(count)} for count in counts]
                for counts in ([8] * ranks, uneven, none)]

    def truth(self, case):
        return weighted(case, lambda r: r["count"], samples)


# ---------------------------------------------------------------- 08.4

class Train(Check):
    exercise = "08.4"
    tolerance = 1e-10
    signatures = [
        gives("every rank trains on the whole data set: rows says which are this rank's",
              everybody_on_everything),
        gives("only the logged loss is averaged: each rank steps along its own gradients, and the ranks' parameters "
              "drift apart", lambda case: nobody_averages(case, "averaged")),
        gives("nothing is averaged: each rank trains alone, and you have {ranks} models",
              lambda case: nobody_averages(case, "own")),
        when("the ranks begin with different parameters: their differences stay for ever, whatever is averaged later",
             differences_stay),
        when("the parameters aren't changed in place: parameter = … makes another array, and parameters[i] = … puts "
             "one into the list (parameter -= … writes into the model's own)",
             not_moved),
        gives("the steps are {ranks} times too long: gradients that are already averaged need no factor for the ranks",
              lambda case: [together(case, lr=len(case))] * len(case)),
        gives("the steps are {ranks} times too short: the gradients were averaged already",
              lambda case: [together(case, lr=1 / len(case))] * len(case)),
        gives("the rows of the first step are counted in all steps, but not every batch is as long as the first",
              weighed(lambda r, step: len(r["rows"][0]))),
        gives("mean of means: the ranks' gradients weigh the same. average_gradients is told of how many rows each is "
              "the mean: this rank's, in this step", weighed(lambda r, step: 1)),
        gives("the training is right, but each rank returns the loss of its own rows, not of the global batch",
              lambda case: own_losses(case)),
        gives("the training is right, but the loss is a mean of the ranks' means: weigh it by their rows",
              lambda case: [found | {"result": list(np.mean([f["result"] for f in own_losses(case)], axis=0))}
                            for found in own_losses(case)]),
        *(gives("the training is right, but the loss is of after the update", right) for right in (
              lambda case: [together(case, after=True)] * len(case),
              lambda case: [found | {"result": together(case, STEPS + 1)["result"][1:]} for found in
                            [together(case)] * len(case)])),
    ]

    demands = [demand("right, but the parameters are sent around more than once: with one start and the same steps "
                      "they stay alike by themselves, and if they didn't, that would hide it",
                      lambda case, got: all(g.ops().count("broadcast") <= len(case[0]["parameters"]) for g in got)),
               demand("right, but the parameters are averaged in every step: gradients are what travels. With plain "
                      "SGD it makes no difference; with an optimizer that remembers, every rank would remember "
                      "something else",
                      lambda case, got: not any(name == "parameters" for g in got for name, _ in g.events)),
               demand("right, but every step sends the gradients' bytes twice or more: the gradients travel once, and "
                      "with them the loss and the counts", lambda case, got: all(
                          sum(c["bytes"] for c in g.calls if c["op"] != "broadcast")
                          < 2 * STEPS * sum(p.nbytes for p in case[0]["parameters"]) for g in got))]

    def cases(self, rng, ranks):
        x = rng.standard_normal((41, INPUTS))
        y = np.tanh(x @ rng.standard_normal((INPUTS, OUTPUTS))) + 0.1 * rng.standard_normal((41, OUTPUTS))
        order = [rng.permutation(41)[:15 if step % 4 else 9] for step in range(STEPS)]      # not always as many rows
        few = [rng.permutation(41)[:3] for _ in range(STEPS)]      # of four ranks one has no row
        starts = [[rng.standard_normal((INPUTS, OUTPUTS)), rng.standard_normal(OUTPUTS)] for _ in range(4)]
        return [[{"parameters": [p.copy() for p in starts[rank]], "x": x, "y": y, "lr": 0.1,
                  "rows": [rows[rank::ranks] for rows in steps]} for rank in range(ranks)]
                for steps in ([order, few] if ranks == 4 else [order])]

    def truth(self, case):
        return [together(case)] * len(case)

    def picture(self, runs, path):
        from exercises.frame.pictures import two_curves
        curves = {n: found[0][1][0]["result"] for n, found in sorted(runs.items())}
        return two_curves(curves, path, "loss of the global batch", "step")
