"""What the answers of chapter 9 are tried with, and the mistakes that are known."""

import numpy as np

from exercises.frame import Check, demand, gives, when

from . import filling
from .drawing import draw_both
from .pieces import (
    WIDTH,
    each,
    each_divided,
    everybodys,
    everyones,
    last_piece_reduced,
    moments,
    nested,
    own_totals,
    piece_by_piece,
    reduced_each_time,
    right,
)

# ---------------------------------------------------------------- 09.1


class Buckets(Check):
    exercise = "09.1"
    integers = ("result",)
    signatures = [
        gives("the buckets begin with the first parameter: backward reaches the last one first, so this bucket would "
              "be complete last", lambda case: {"result": filling.cut_of(case, order=filling.forwards(case))}),
        gives("the right buckets, but listed from the first layer on: the one that is complete first must come first",
              lambda case: {"result": [b[::-1] for b in filling.cut_of(case)[::-1]]}),
        gives("the last bucket is missing: what is left over when the parameters are through is a bucket too",
              lambda case: {"result": filling.cut_of(case)[:-1]}),
        gives("an empty bucket is left over at the end: begin a new one only when there is a parameter to go into it",
              lambda case: {"result": filling.cut_of(case) + [[]] * filling.full_to_the_end(case)}),
        gives("the right buckets, but within each the parameters aren't in the order in which their gradients come",
              lambda case: {"result": [sorted(bucket) for bucket in filling.cut_of(case)]}),
        gives("a message per parameter: nothing is gathered until a bucket is full",
              lambda case: {"result": [[i] for i in filling.backwards(case)]}),
        gives("the first bucket is as large as the others: it is full at first_bytes, so that sending begins early",
              lambda case: {"result": filling.cut_of(case, first=case["cap_bytes"])}),
        gives("every bucket is as small as the first: only the first is full at first_bytes",
              lambda case: {"result": filling.cut_of(case, cap=case["first_bytes"])}),
        gives("buckets are closed before they would grow beyond the cap: the parameter that fills a bucket still goes "
              "into it", lambda case: {"result": filling.never_over(case)}),
        gives("a bucket that holds exactly its cap is full", lambda case: {"result": filling.only_above(case)}),
        gives("the bytes held are never set back to 0: after the first full bucket every parameter gets its own",
              lambda case: {"result": filling.total_held(case)}),
        gives("a bucket that holds 0 bytes is taken for none: a parameter may have no elements, and the next one goes "
              "into its bucket", lambda case: {"result": filling.begun_at_0(case)}),
        gives("what a bucket holds beyond its cap is counted again in the next one: that begins with 0 bytes",
              lambda case: {"result": filling.over_counted(case)}),
        gives("first_bytes is used where the first layer is: the first bucket is the one that is complete first, with "
              "the last layers", lambda case: {"result": filling.small_at_the_end(case)}),
        gives("the parameters are sorted by their size: they come in the order in which backward reaches them",
              lambda case: {"result": filling.by_size(case)}),
    ]

    def cases(self, rng, ranks):
        found = [{"nbytes": [700, 300, 400, 600, 50, 100], "first_bytes": 100, "cap_bytes": 1000},
                 {"nbytes": [40, 8, 8, 8, 24, 8, 16], "first_bytes": 16, "cap_bytes": 32},
                 {"nbytes": [3, 5, 7, 2, 1], "first_bytes": 1, "cap_bytes": 10},
                 {"nbytes": [5], "first_bytes": 10, "cap_bytes": 20},
                 {"nbytes": [500, 2, 3], "first_bytes": 4, "cap_bytes": 8},
                 {"nbytes": [3, 900, 5, 2, 9], "first_bytes": 20, "cap_bytes": 10},
                 {"nbytes": [0, 6, 0, 9, 0, 0, 3, 0], "first_bytes": 4, "cap_bytes": 6}]      # some have no elements
        for _ in range(6):
            sizes = rng.integers(1, 40, int(rng.integers(9, 25))).tolist()
            found.append({"nbytes": sizes, "first_bytes": int(rng.integers(2, 30)),
                          "cap_bytes": int(rng.integers(40, 120))})
        return found

    def truth(self, case):
        return {"result": filling.cut_of(case)}


# ---------------------------------------------------------------- 09.2

SHAPES = [(7, 5), (5,), (5, 11), (11,), (11, 9), (9,), (9, 4)]
BUCKETS = [[6], [5, 4, 3], [2], [1, 0]]
LATENCY, BANDWIDTH = 2.0 ** -6, 2.0 ** 12
PASSES = 4


def summed(case, passes=PASSES, over=None):
    """For each pass the sums over the ranks (or over some of them)."""
    ranks = case if over is None else over
    return [[sum(used(r, p, i) for r in ranks) for i in range(len(SHAPES))] for p in range(passes)]


def size_of(inputs, bucket):
    """Its bytes."""
    return np.dtype(inputs["dtype"]).itemsize * sum(int(np.prod(SHAPES[i])) for i in bucket)


def used(inputs, p, i):
    """A rank's gradient by parameter i in pass p; zeros where it hasn't used it."""
    return inputs["own"][p][i] if i in inputs["orders"][p] else np.zeros(SHAPES[i])


def outputs(case, grads):
    """Of each rank's grads, [rank][pass][parameter]; another Reducer beside has as many, of the opposite sign."""
    return [{"grads": mine} | ({"beside": [[-g for g in p] for p in mine]} if case[0]["beside"] else {})
            for mine in grads]


def own(case):
    """Every rank has its own gradients."""
    return outputs(case, [[[used(r, p, i) for i in range(len(SHAPES))] for p in range(PASSES)] for r in case])


def stale(case):
    """The later passes give the first one's sums again."""
    return outputs(case, [[summed(case)[0]] * PASSES] * len(case))


def too_early(case, got):
    """Buckets of the later passes hold what was there before a gradient was written."""
    def nan(of_pass):
        return any(np.isnan(grad).any() for grad in of_pass)
    return all(not nan(rank["grads"][0]) for rank in got) and any(nan(p) for rank in got for p in rank["grads"][1:])


def without_unused(case):
    """Buckets of which a rank misses a gradient are never posted by anyone, and keep each rank's own."""
    found = [rank["grads"] for rank in own(case)]
    for p in range(PASSES):
        missing = [any(i not in r["orders"][p] for r in case for i in bucket) for bucket in BUCKETS]
        for rank in found:
            for bucket, lost in zip(BUCKETS, missing, strict=True):
                for i in bucket:
                    if not lost:
                        rank[p][i] = summed(case)[p][i]
    return outputs(case, found)


def leaving(inputs, p):
    """When each bucket can be posted: when its gradients are there, and the bucket before it has been."""
    times = np.cumsum([inputs["costs"][i] for i in inputs["orders"][p]])
    at = dict(zip(inputs["orders"][p], times, strict=True))
    return np.maximum.accumulate([max(at.get(i, times[-1]) for i in bucket) for bucket in BUCKETS])


def seconds(inputs, p, ranks, rank=0, early=True):
    """What a pass takes; the link is a queue."""
    over, free = sum(inputs["costs"][i] for i in inputs["orders"][p]), 0.0
    for bucket, leaves in zip(BUCKETS, leaving(inputs, p) if early else [over] * len(BUCKETS), strict=True):
        nbytes = size_of(inputs, bucket)
        share = nbytes * (rank + 1) // ranks - nbytes * rank // ranks      # what this rank reduces, and sends round
        free = max(free, leaves) + LATENCY + 2 * (ranks - 1) * share / BANDWIDTH
    return max(free, over)


NOT_WAITED = ("a bucket was posted and never waited for: until wait() has returned, nobody knows what is in the array. "
              "Each has a wait() of its own")


def never_finished(case, got):
    return any(call["end"] is None for g in got for call in g.calls)


def every_bucket_once(case, got):
    if len(case) == 1:       # where nothing need be sent
        return True
    sizes = [size_of(case[0], bucket) for bucket in BUCKETS]
    return all([nbytes for _, nbytes, *_ in posts] == sizes for g in got for posts in g["posts"])


def in_float64(case, got):
    """Every bucket was posted once, and in 8 bytes per number, where the gradients have 4."""
    double = [{"dtype": "float64"} for _ in case]
    return case[0]["dtype"] == "float32" and len(case) > 1 and every_bucket_once(double, got)


def while_backward_runs(case, got):
    """With all parameters used, all buckets but the last leave before the last gradient is there."""
    return all(ready < len(SHAPES) for g in got for ready, *_ in g["posts"][0][:-1])


def last_one_too(case, got):
    return all(ready <= len(SHAPES) for g in got for ready, *_ in g["posts"][0])


def as_early_as_possible(case, got):
    # One rank alone has nothing to post: its all_reduce is over at once.
    n = len(case)
    return n == 1 or all(g["seconds"][p] <= seconds(r, p, n, rank) + 1e-9
                         and np.all([post[2] for post in g["posts"][p]] <= leaving(r, p) + 1e-9)
                         for rank, (g, r) in enumerate(zip(got, case, strict=True)) for p in range(PASSES))


class ReducerCheck(Check):
    exercise = "09.2"
    same_bits = ("grads",)
    signatures = [
        when(NOT_WAITED, never_finished),
        gives("the first pass is right, and the later ones give its sums again: what is missing, and what was posted, "
              "must be set up anew for each pass",
              lambda case: stale(case) if len(case) > 1 else None),
        when("the first pass is right, and in the later ones buckets leave before their gradients are there: what is "
             "missing must be set up anew for each pass", too_early),
        gives("a bucket with a gradient that some rank hasn't used is never posted: finish() must send what is still "
              "at home, with zeros for what wasn't used", lambda case: without_unused(case) if len(case) > 1 else None),
        gives("each rank still has its own gradients: the sums were not written back into the arrays of grads",
              lambda case: own(case) if len(case) > 1 else None),
        gives("the gradients are averaged; the sum was asked for",
              lambda case: outputs(case, [[[g / len(case) for g in p] for p in summed(case)]] * len(case))),
        when("one Reducer alone is right, and with another one beside it, it isn't: what is missing, what was posted, "
             "buckets and grads are each Reducer's own. They belong on self, not on the class or the module",
             lambda case, got: case[0]["beside"]),
    ]
    demands = [
        demand("the sums are right, by luck: " + NOT_WAITED, lambda case, got: not never_finished(case, got)),
        demand("the sums are right, but the buckets travel in another dtype than that of grads: of float32 gradients "
               "float64 ones take twice as long. np.zeros and np.empty make float64 unless told otherwise",
               lambda case, got: not in_float64(case, got)),
        demand("the sums are right, but each bucket must travel once per pass, as one array: the bytes posted are not "
               "those of the buckets", every_bucket_once),
        demand("the sums are right, but nothing overlaps: buckets are posted when backward is over already. Post "
               "in ready(), as soon as the last gradient of a bucket is there", while_backward_runs),
        demand("the sums are right, but a pass takes longer over the simulated link than it must, or has the wire "
               "idle: some bucket leaves later than it could (one gradient may let several go), or ready() waits",
               as_early_as_possible),
        demand("the sums are right, but the last bucket leaves in finish(): it is complete when its last gradient is, "
               "and ready() posts what can be posted", last_one_too),
    ]

    def cases(self, rng, ranks):
        n = len(SHAPES)
        costs = [float(c) / 64 for c in rng.integers(2, 9, n)]
        base = {"shapes": [list(s) for s in SHAPES], "buckets": BUCKETS, "costs": costs, "latency": LATENCY,
                "bandwidth": BANDWIDTH}
        backward = list(range(n))[::-1]
        found = []
        for swap, skipped, beside in ((False, False, False), (True, True, False), (False, False, True)):
            case = []
            for rank in range(ranks):
                orders = []
                for p in range(PASSES):
                    order = backward.copy()
                    if swap:        # parameters of neighbouring buckets in another order on each rank
                        at = (2 * p + rank + 3) % (n - 1)      # on rank 0 first such that two buckets go at once
                        order[at], order[at + 1] = order[at + 1], order[at]
                        order = order[::-1] if p == 2 and rank % 2 else order
                    if skipped and p % 2:        # between two passes in which all are used
                        order = [i for i in order if i not in {(3 * rank + p) % n, 2}]
                    orders.append(order)
                own = [[rng.integers(-9, 10, s).astype(np.float32) if swap else 10 * rng.standard_normal(s)
                        for s in SHAPES] for _ in range(PASSES)]       # whole numbers: their sums are exact
                case.append(base | {"orders": orders, "own": own, "dtype": str(own[0][0].dtype),
                                    "beside": beside})
            found.append(case)
        return found

    def truth(self, case):
        return outputs(case, [summed(case)] * len(case))

    def picture(self, runs, path):
        ranks = max(runs)
        case, got = runs[ranks][0]
        inputs, mine = case[0], got[0]
        late = seconds(inputs, 0, ranks, early=False)
        draw_both(inputs, [(begin, end) for *_, begin, end in mine["posts"][0]], mine["seconds"][0], late, path)
        return (f"one backward pass on {ranks} ranks over a simulated link: {1e3 * mine['seconds'][0]:.0f} ms, where "
                f"it would be {1e3 * late:.0f} ms without overlap")


# ---------------------------------------------------------------- 09.3

class Accumulate(Check):
    exercise = "09.3"
    same_bits = ("totals",)
    signatures = [
        when("an array was posted and never waited for: without async_op all_reduce(x) returns when x is the sum, with "
             "it what it returns has a wait()", never_finished),
        gives("nothing is reduced: each rank has its own pieces' gradients; the last one must be outside of no_sync()",
              lambda case: own_totals(case) if len(case) > 1 else None),
        gives("nothing has got into the arrays of grads: grad = grad + more gives the name grad to a new array, "
              "grads[i] = … puts another array into the list; grad += more writes into the array itself",
              lambda case: right(case, totals=[[0 * g for g in total] for total in everybodys(case)],
                                 after_exception=np.zeros((2, 2)), nested=np.zeros((4, 2)), beside=np.zeros((2, 2)),
                                 after_failure=np.zeros(2), not_entered=np.zeros(2))),
        gives("not divided: the pieces' sums are added up, but the mean over the global batch was asked for",
              lambda case: right(case, totals=everybodys(case, divide=lambda r: 1))),
        gives("divided by the samples of this rank only: count is that of the global batch, and already given",
              lambda case: None if len(case) == 1 else right(case, totals=[[
                  sum(m[a] / max(sum(map(len, r["batches"][b])), 1) for r, m in
                      ((r, moments(r["batches"][b])) for r in case)) for a in range(2)] for b in range(2)])),
        gives("only the last piece's gradients are divided by count: those of every piece are of sums, or what is "
              "added up is divided once, at the end", lambda case: right(case, totals=each_divided(
                  case, lambda piece, k, pieces: case[0]["count"] if k == len(pieces) - 1 else 1))),
        gives("the last piece's gradients aren't divided by count, and those of the others are",
              lambda case: right(case, totals=each_divided(
                  case, lambda piece, k, pieces: 1 if k == len(pieces) - 1 else case[0]["count"]))),
        gives("the last piece counts twice: once inside no_sync() with the others, and once more to be reduced",
              lambda case: right(case, totals=everybodys(case, lambda pieces: [*pieces, pieces[-1]]))),
        gives("a mean of means: each piece's gradients are divided by the samples of the piece and by the number of "
              "pieces, and pieces aren't equally long. Divide by count, the samples of the global batch",
              lambda case: right(case, totals=each_divided(
                  case, lambda piece, k, pieces: max(len(piece), 1) * len(pieces)))),
        gives("each piece's gradients are divided by the samples of the piece: count was asked for, the samples of the "
              "global batch", lambda case: right(case, totals=each_divided(
                  case, lambda piece, k, pieces: max(len(piece), 1)))),
        gives("only the last piece counts: grads are zeroed, or overwritten, for each piece",
              lambda case: right(case, totals=everybodys(case, lambda pieces: pieces[-1:]))),
        gives("the first piece is lost", lambda case: right(case, totals=everybodys(case, lambda p: p[1:] or p))),
        gives("the last piece is lost", lambda case: right(case, totals=everybodys(case, lambda p: p[:-1] or p))),
        gives("every piece is reduced, and what was summed over the ranks already is summed again: all but the last "
              "piece belong inside no_sync()",
              lambda case: right(case, totals=reduced_each_time(case, 1)) if len(case) > 1 else None),
        gives("only the last piece is summed over the ranks, and of those before it each rank has its own: reduce "
              "grads, with all that has been added up, not what is new", last_piece_reduced),
        when("an exception inside of no_sync() is lost: whoever called must hear of it. try and finally, without an "
             "except, let it pass", lambda case, got: all("nothing" in g["raised"] for g in got)),
        when("an exception in gradients() is lost: whoever called must hear of it",
             lambda case, got: all(g["heard"] == "nothing" for g in got)),
        gives("after an exception in gradients() that backward() still talks to nobody: accumulate has switched "
              "reducing off by itself, and nobody switches it on again. no_sync() does",
              lambda case: each(case, after_failure=lambda rank: np.full(2, rank + 1.0))),
        gives("after an exception inside, no_sync() has not been taken back: that backward() still talks to nobody",
              lambda case: each(case, after_exception=lambda rank: np.full((2, 2), rank + 1.0),
                                after_failure=lambda rank: np.full(2, rank + 1.0))),
        gives("after a KeyboardInterrupt inside (somebody stops the cell of a notebook), no_sync() has not been taken "
              "back: `except Exception` doesn't catch it. What stands in a `finally` runs whatever has happened",
              lambda case: each(case, after_exception=lambda rank: np.full((2, 2), [[everyones(case)], [rank + 1.0]]))),
        gives("the inner of two no_sync() has switched reducing on again, inside of the outer one: put back what was "
              "there before, not True", lambda case: each(case, nested=lambda rank: nested(case, rank, (
                  False, True, True, True)))),
        gives("an exception in the inner of two no_sync() has switched reducing on again, inside of the outer one: put "
              "back what was there before, not True, whatever has happened",
              lambda case: each(case, nested=lambda rank: nested(case, rank, (False, False, True, True)))),
        gives("the inner of two no_sync() has switched reducing on: inside, backward() talks to nobody, and a switch "
              "that is turned round twice is where it was",
              lambda case: each(case, nested=lambda rank: nested(case, rank, (True, False, False, True)))),
        gives("behind two no_sync(), one inside the other, nothing is reduced any more: what the inner one remembers, "
              "that reducing was off, has taken the place of what the outer one has. Each remembers for itself",
              lambda case: each(case, nested=lambda rank: nested(case, rank, (False,) * 4))),
        gives("no_sync() was only called, and backward() talks to nobody already: reducing is off from where `with` "
              "enters it", lambda case: each(case, not_entered=lambda rank: np.full(2, rank + 1.0))),
        gives("another GradientSync has switched reducing on again, inside of this one's no_sync(): whether to reduce "
              "belongs to each for itself, not to the class",
              lambda case: each(case, beside=lambda rank: np.full((2, 2), everyones(case)))),
        gives("the no_sync() of one GradientSync keeps another from reducing, too: whether to reduce belongs to each "
              "for itself, not to the class", lambda case: each(case, beside=lambda rank: np.full((2, 2), rank + 1.0))),
        gives("the pieces' gradients are divided twice: by the count, and by the number of pieces",
              lambda case: right(case, totals=[[g / len(case[0]["batches"][b]) for g in total]
                                               for b, total in enumerate(everybodys(case))])),
        gives("the sums are averaged over the ranks: all is {ranks} times too small",
              lambda case: [answer | {"totals": [[g / len(case) for g in total] for total in answer["totals"]],
                                      "nested": answer["nested"] / [[1], [1], [1], [len(case)]],
                                      "beside": answer["beside"] / [[1], [len(case)]]}
                            | {name: answer[name] / len(case) for name in (
                                "after_exception", "after_failure", "not_entered")}
                            for answer in right(case)] if len(case) > 1 else None),
    ]
    demands = [demand("the right gradients, but more than one set of reductions: one all_reduce per array and batch",
                      lambda case, got: all(len(g.calls) <= 2 * 2 + 6 for g in got)),
               demand("the right gradients, but not piece by piece: gradients(piece) is to be called with one piece at "
                      "a time, since all of them together don't fit into memory", piece_by_piece),
               demand("the right gradients, but the pieces' gradients are all kept until the last one's are there: "
                      "each is as large as the model. Add them up piece by piece",
                      lambda case, got: all(g["alive"] <= 2 for g in got)),
               demand("right, but backward() has changed the arrays of `new`: they are the caller's, who may need "
                      "them. Only grads is to be written into", lambda case, got: all(g["new_kept"] for g in got)),
               demand("the right gradients, but the list pieces has lost some of them, or has them in another order: "
                      "it is the caller's", lambda case, got: all(g["kept"] for g in got))]

    def cases(self, rng, ranks):
        found = []
        for pieces in ((3, 2), (1, 4)):
            sizes = rng.integers(1, 6, (2, ranks, max(pieces)))
            draw = rng.standard_normal
            if pieces[0] > 1:
                sizes[0, 0, pieces[0] - 1] = 0      # nothing in rank 0's last piece: it takes part all the same
            elif ranks > 1:
                sizes[0, 0] = 0                     # nothing at all
            case = [{"width": WIDTH, "count": 37,
                     "batches": [[2 + draw((int(sizes[b, rank, k]), WIDTH)) for k in range(pieces[b])]
                                 for b in range(2)]} for rank in range(ranks)]
            found.append(case)
        return found

    def truth(self, case):
        return right(case)
