"""What the answers of chapter 10 are tried with, and the mistakes that are known."""

import math

import numpy as np

from exercises.frame import Check, demand, gives, when
from exercises.frame.comparing import same, shaped
from exercises.frame.messages import SENDS, bytes_sent, messages, steps

from . import crossings
from .plans import as_lists, from_the_start_again, goes_on, in_plans, made, odd_one, plan, travelled, what_stops

LONG = 40_003      # elements: no MPI library copies 320,000 bytes aside


def neighbours_of(rank):
    """The ranks that a rank sends to."""
    return sorted({call["peer"] for call in rank.calls if call["op"] in SENDS})


def longest(case):
    """Bytes of the longest chunk, if they are as even as possible."""
    x = case[0]["x"]
    return -(-len(x) // len(case)) * x.itemsize


def largest(got):
    """Bytes of the largest message."""
    return max((call["bytes"] for rank in got for call in rank.calls), default=0)


one_neighbour = demand(
    lambda case, got: f"right, but that is no ring: rank 0 sends to the ranks {neighbours_of(got[0])}. In a ring each "
                      "rank sends to one neighbour only, so that N wires are enough, each of them always busy",
    lambda case, got: all(len(neighbours_of(rank)) <= 1 for rank in got))
waited = demand("a posted message is never waited for: MPI may still be reading from the array when you change it",
                lambda case, got: all(call["end"] is not None for rank in got for call in rank.calls))


# ---------------------------------------------------------------- 10.1

class Table(Check):
    exercise = "10.1"
    signatures = [
        when("the result isn't a list of pairs (send, receive)", lambda case, got: "no_pairs" in got),
        when(lambda case, got: f"chunks have the numbers 0, 1, 2 …, ints, and one of yours is {got['no_integer']}: / "
                               "gives fractions, // and % whole numbers; np.zeros holds floats",
             lambda case, got: "no_integer" in got),
        when("that is the first half only: complete chunks must still travel to all ranks, N-1 steps more",
             made(lambda r, s, n: (r - s) % n, lambda r, s, n: (r - s - 1) % n, lambda n: n - 1)),
        when("one step too many in each half: after N-1 steps a chunk has been on all N ranks. Another step sends the "
             "own chunk a second time",
             made(lambda r, s, n: (r - s) % n, lambda r, s, n: (r - s - 1) % n, lambda n: 2 * n)),
        when(lambda case, got: "the plan of rank {1} has a length of {2}, and on {0} ranks it takes 2(N-1) = {3} "
                               "steps: N-1 until each chunk is complete, N-1 until all have it"
             .format(*odd_one(case, got)),
             lambda case, got: odd_one(case, got) is not None),
        when("a rank sends and receives the same chunk in one step: what it adds to has just left",
             in_plans(lambda sends, receives, n: n > 1 and np.array_equal(sends, receives))),
        gives("send and receive are mixed up in the pairs",
              plan(lambda r, s, n: (r - s - 1) % n, lambda r, s, n: (r - s) % n)),
        gives("the steps are there, but the last one comes first: what a rank sends must have arrived before",
              plan(lambda r, s, n: (r - 2 * n + s + 3) % n, lambda r, s, n: (r - 2 * n + s + 2) % n)),
        gives("the second half begins with chunk r on rank r again, which has only rank r's part in it there: what is "
              "complete is what arrived last",
              plan(from_the_start_again, lambda r, s, n: from_the_start_again(r - 1, s, n))),
        gives("what arrives comes from the wrong side: rank r receives what rank r + 1 sends, not rank r - 1",
              plan(lambda r, s, n: (r + s) % n, lambda r, s, n: (r + s + 1) % n)),
        when("chunks have numbers from 0 to N-1, and some of yours haven't: what is to the left of 0?",
             in_plans(lambda sends, receives, n: min(sends.min(), receives.min()) < 0
                      or max(sends.max(), receives.max()) >= n)),
        when("all ranks have the same plan: all would send the same chunk, and the others stay where they are",
             in_plans(lambda sends, receives, n: n > 1 and (sends == sends[0]).all())),
        when("the plans don't fit together: in some step a rank expects another chunk than its left neighbour sends",
             in_plans(lambda sends, receives, n: not np.array_equal(receives, np.roll(sends, 1, axis=0)))),
        when("a good plan, but it begins with another chunk: in step 0 rank r sends chunk r",
             in_plans(lambda sends, receives, n: goes_on(sends, receives, n)
                      and not np.array_equal(sends[:, 0], np.arange(n)))),
        when(lambda case, got: f"what arrives in a step isn't what goes on in the next: {what_stops(case, got)}",
             in_plans(lambda sends, receives, n: not goes_on(sends, receives, n))),
    ]

    def cases(self, rng, ranks):
        return [{"size": size} for size in (4, 3, 2, 5, 8, 1)]

    def truth(self, case):
        return as_lists(*travelled(case["size"]))


# ---------------------------------------------------------------- 10.2 and 10.3: what becomes of one chunk

def combined(here, arrived, combine):
    return combine(here, arrived)


def overwritten(here, arrived, combine):
    return arrived


def arrived_twice(here, arrived, combine):
    return combine(arrived, arrived)


def walk(arrays, p, combine, first=combined, second=overwritten, restart=False):
    """All ranks' arrays after the walk of chunk p, if every element belonged to it.

    It is handed on from rank p to p + 1, … 2(N-1) times, or N-1 times if there is no second half; what a rank then has
    is first(here, arrived, combine), in the second half second(…). restart: the second half begins on rank p again.
    """
    have, n = list(arrays), len(arrays)
    for step in range((2 if second else 1) * (n - 1)):
        late = step >= n - 1
        src = (p + step - (n - 1 if restart and late else 0)) % n
        dst = (src + 1) % n
        have[dst] = (second if late else first)(have[dst], have[src], combine)
    return have


def combine_of(case):
    return getattr(np, case[0].get("combine", "add"))


def reduced(case):
    return combine_of(case).reduce([rank["x"] for rank in case])


def walked(**how):
    """Signature's predicate: every element is what `walk` gives for some chunk, wherever the array was cut."""
    def holds(case, got):
        mine, arrays = np.array([rank["x"] for rank in got]), [rank["x"] for rank in case]
        if len(case) == 1 or mine.shape != np.shape(arrays):
            return False
        return bool(np.any([np.isclose(mine, walk(arrays, p, combine_of(case), **how), rtol=1e-9, atol=1e-9).all(axis=0)
                            for p in range(len(case))], axis=0).all())
    return holds


# ---------------------------------------------------------------- 10.2

def bounds(n, i, size):
    return slice(n * i // size, n * (i + 1) // size)


def of_own_chunk(value):
    """Hypothesis: value(arrays, rank, N) in the chunk that the rank was to complete."""
    def outputs(case):
        n, arrays = len(case), [rank["x"] for rank in case]
        return [{"chunk": value(arrays, rank, n)[bounds(len(arrays[0]), (rank + 1) % n, n)]} for rank in range(n)]
    return outputs


def cut_elsewhere(case):
    """The right walk, of chunks that np.array_split has cut: where N doesn't divide the length, at other places."""
    arrays = np.array([rank["x"] for rank in case])
    have = np.concatenate([np.array(walk(list(piece), p, np.add, second=None)).reshape(piece.shape) for p, piece in
                           enumerate(np.array_split(arrays, len(case), axis=1))], axis=1)
    return of_own_chunk(lambda x, rank, n: have[rank])(case)


def too_early(case, got):
    if min(len(rank.calls) for rank in got) < 2 * (len(case) - 1):
        return "the part of the rank on which the chunk set out is missing: one step too few"
    return ("after all steps one rank's part of chunk rank + 1 is still missing: another chunk is complete instead. "
            "Was it this rank's own plan, table(rank, size)?")


def never_touched(case, got):
    steps = min(len(rank.calls) for rank in got) // 2
    if steps < len(case) - 1:
        return f"after {steps} of {len(case) - 1} steps chunk rank + 1 hasn't come to its rank yet: it is what it was"
    return ("the chunk is what it was: what arrived was added to something else than x (a view, x[a:b], is part of x, "
            "a copy isn't), or only to other chunks (the first N-1 pairs of the table bring this one)")


posted_only = when("irecv only posts the array: what comes is in it after wait(), and not before",
                   lambda case, got: any(call["op"] == "irecv" and call["end"] is None for rank in got
                                         for call in rank.calls))


class ReduceScatter(Check):
    exercise = "10.2"
    may_change = ("x",)
    signatures = [
        when("no message is sent", lambda case, got: len(case) > 1 and not any(rank.calls for rank in got)),
        posted_only,
        gives(never_touched, of_own_chunk(lambda x, rank, n: x[rank])),
        gives("what arrived has overwritten what was there: in this half it is added",
              of_own_chunk(lambda x, rank, n: x[(rank + 1) % n])),
        gives("every rank sends its own numbers in each step: what goes on must be the sum with what arrived before",
              of_own_chunk(lambda x, rank, n: x[rank] + x[rank - 1])),
        gives(too_early, of_own_chunk(lambda x, rank, n: sum(x) - x[(rank + 1) % n])),
        gives("what arrives is written over what it should be added to, and then added to itself: it needs an array of "
              "its own", of_own_chunk(lambda x, rank, n: 2 ** (n - 1) * x[(rank + 1) % n])),
        gives("what arrives is added twice", of_own_chunk(
            lambda x, rank, n: sum(2 ** (n - 1 - i) * x[(rank + 1 + i) % n] for i in range(n)))),
        gives("what arrives is handed on without this rank's own part: keep the sum, and send the sum",
              of_own_chunk(lambda x, rank, n: x[rank] + x[(rank + 1) % n])),
        gives("the result is the mean: {ranks}.000 times too small. A sum was asked for",
              of_own_chunk(lambda x, rank, n: sum(x) / n)),
        gives("x is cut at other places than chunks() cuts it, as np.array_split does: chunk 1 of 4 of 19 elements "
              "begins with the fifth, not with the sixth", cut_elsewhere),
    ]
    demands = [
        waited,
        demand(lambda case: f"right, but with too many messages: every rank sends {len(case) - 1}, and then its chunk "
                            "is complete",
               lambda case, got: all(len(rank.calls) <= 2 * (len(case) - 1) for rank in got)),
        demand(lambda case: f"right, but every rank sends more than {(len(case) - 1) / len(case):.2f} times the array: "
                            "only one chunk leaves in a step, not all of x",
               lambda case, got: max(bytes_sent(got)) <= (len(case) - 1) * longest(case)),
        demand(lambda case: f"right, but the messages take more than {len(case) - 1} steps: all ranks send at the same "
                            "time", lambda case, got: len(case) == 2 or steps(got) <= len(case) - 1),
        one_neighbour,
    ]

    def cases(self, rng, ranks):
        sums = [[{"x": rng.standard_normal(n)} for _ in range(ranks)] for n in (19, LONG, 3)]
        return [*sums, [{"x": rng.integers(-9, 9, 10).astype(np.float32)} for _ in range(ranks)]]

    def truth(self, case):
        return of_own_chunk(lambda x, rank, n: np.sum(x, axis=0))(case)      # exact in float32: whole numbers


# ---------------------------------------------------------------- 10.3

def tail_left(case):
    """The last n % N elements aren't reduced."""
    whole, keep = reduced(case), len(case[0]["x"]) // len(case) * len(case)
    return [{"x": np.concatenate([whole[:keep], rank["x"][keep:]])} for rank in case]


def in_pairs(case):
    """Every rank shares with rank XOR 1 only."""
    if len(case) % 2:
        return None
    combine = combine_of(case)
    return [{"x": combine(case[rank]["x"], case[rank ^ 1]["x"])} for rank in range(len(case))]


def sent_again(case, got):
    """The second half begins with the slice with which the first began."""
    def slices(rank):
        return [detail for name, detail in rank.events if name == "slice"]
    return len(case) > 1 and all(len(s) > len(case) - 1 and s[0] == s[len(case) - 1] for s in map(slices, got)) \
        and walked(restart=True)(case, got)


def one_half(case, got):
    if len(messages(got)) < 2 * (len(case) - 1) * len(case):
        return "only the first half: every element is complete on one rank, and the others don't get it"
    return "x has the numbers of one half only: parts[i] = … changes a list of chunks; parts[i][:] = … writes into x"


def per_rank(got):
    """Messages that a rank sends, on the average."""
    return len(messages(got)) / len(got)


class RingAllReduce(Check):
    exercise = "10.3"
    same_bits = ("x",)
    signatures = [
        when("no message is sent", lambda case, got: len(case) > 1 and not messages(got)),
        gives("x isn't changed: write into x, or into views of it (x = … only gives the name to another array)",
              lambda case: [{"x": rank["x"]} for rank in case]),
        posted_only,
        when(one_half, walked(second=None)),
        gives(lambda case: f"the last {len(case[0]['x']) % len(case)} of {len(case[0]['x'])} elements are still each "
                           "rank's own: n // N drops the rest of the division", tail_left),
        gives(lambda case: f"combine is ignored: it was np.{case[0]['combine']}, and you have added",
              lambda case: [{"x": np.sum([rank["x"] for rank in case], axis=0)}] * len(case)),
        gives("combine is ignored: it was np.minimum, and you have taken the maximum", lambda case: None
              if case[0]["combine"] == "add" else [{"x": np.max([rank["x"] for rank in case], axis=0)}] * len(case)),
        gives("every rank has the sum of itself and one neighbour: that is right for two ranks only", in_pairs),
        when(lambda case, got: f"a rank sends {per_rank(got):g} of the 2(N-1) = {2 * (len(case) - 1)} messages that it "
                               f"takes on {len(case)} ranks, one in every step of both halves",
             lambda case, got: per_rank(got) < 2 * (len(case) - 1)),
        when("the second half begins with the wrong chunk, the own one again, which is complete on another rank: off "
             "by one", sent_again),
        when("every element is that of one rank: in the first half what arrives is added to what is there, in x "
             "itself, and only in the second it overwrites", walked(first=overwritten)),
        when("what arrives is added in the second half too: a complete chunk replaces what is there",
             walked(second=combined)),
        when("what arrives is written over what it should be added to, and then added to itself",
             walked(first=arrived_twice)),
        gives("the result is the mean: {ranks}.000 times too small. A sum was asked for",
              lambda case: [{"x": reduced(case) / (len(case) if rank["combine"] == "add" else 1)} for rank in case]),
    ]
    demands = [
        waited,
        demand(lambda case: f"right, but with too many messages: {2 * (len(case) - 1)} per rank are enough; after N-1 "
                            "steps a chunk has been on all N ranks, and the next one sends it where it began",
               lambda case, got: len(messages(got)) <= 2 * (len(case) - 1) * len(case)),
        demand(lambda case: f"right, but some rank sends more than 2(N-1)/N = {2 - 2 / len(case):.2f} times the array: "
                            "chunks go round the ring, not whole arrays",
               lambda case, got: max(bytes_sent(got)) <= 2 * (len(case) - 1) * longest(case)),
        demand(lambda case, got: f"right, but the chunks aren't as even as they can be: of {case[0]['x'].nbytes} bytes "
                                 f"in {len(case)} chunks one has {largest(got)}, where {longest(case)} are enough. In "
                                 "each step all wait for the longest message",
               lambda case, got: len(case) == 2 or largest(got) <= longest(case)),
        demand(lambda case: f"right, but the messages take more than 2(N-1) = {2 * (len(case) - 1)} steps: all ranks "
                            "send at the same time",
               lambda case, got: len(case) == 2 or steps(got) <= 2 * (len(case) - 1)),
        one_neighbour,
    ]

    def cases(self, rng, ranks):
        return [[{"x": rng.standard_normal(n).astype(dtype), "combine": combine} for _ in range(ranks)]
                for n, dtype, combine in ((19, np.float64, "add"), (LONG, np.float64, "add"), (3, np.float64, "add"),
                                          (9, np.float32, "maximum"), (7, np.float64, "minimum"))]

    def truth(self, case):
        return [{"x": reduced(case)}] * len(case)

    def picture(self, runs, path):
        from exercises.frame.pictures import COLORS, arrows, canvas, save
        case, got = runs[max(runs)][0]
        slices = [[detail for name, detail in rank.events if name == "slice"] for rank in got]
        order = sorted({text for rank in slices for text in rank if text}, key=lambda text: int(text.split(":")[0]))
        figure, (left, right) = canvas(1, 2, size=(10.5, 4.2), width_ratios=(2.4, 1))
        known = {text: number for number, text in enumerate(order)} if len(order) <= len(COLORS) else {}
        arrows(left, messages(got), len(got), lambda message: known.get(slices[message.src][message.number]),
               {number: f"x[{text}]" for text, number in known.items()})
        sizes = sorted(n for n in runs if n > 1)
        share = [max(bytes_sent(runs[n][1][1])) / runs[n][1][0][0]["x"].nbytes for n in sizes]
        places = np.arange(len(sizes))
        right.bar(places - 0.2, share, 0.38, color=COLORS[0], label="your ring")
        right.bar(places + 0.2, [n - 1 for n in sizes], 0.38, color="#c9d1da", label="whole arrays round the ring")
        right.axhline(2, color=COLORS[1], lw=1, ls="--")
        right.set(xticks=places, xticklabels=[f"{n} ranks" for n in sizes], ylabel="bytes sent per rank / bytes of x",
                  ylim=(0, max(*sizes, 3) + 0.2))
        right.legend(frameon=False, loc="upper left")
        save(figure, path)
        return (f"{len(got)} ranks, {steps(got)} steps; each rank sends "
                + ", ".join(f"{s:.2f}" for s in share) + f" times the array on {', '.join(map(str, sizes))} ranks")


# ---------------------------------------------------------------- 10.4

class Crossover(Check):
    exercise = "10.4"
    signatures = crossings.SIGNATURES

    def cases(self, rng, ranks):
        nbytes = 4096.0 * 2 ** np.arange(0, 18)
        fixed = [{"size": size, "alpha": 5e-6, "beta": 1e-10, "nbytes": nbytes} for size in (4, 16, 64)]
        # They cross at 32 GB; the last arrays take more than a second per rank, and // makes whole seconds of that.
        far = {"size": 32, "alpha": 0.05, "beta": 1e-11, "nbytes": 2.0 ** 14 * nbytes}
        drawn = [{"size": size, "alpha": float(rng.uniform(1e-6, 1e-4)), "beta": float(rng.uniform(1e-11, 1e-8)),
                  "nbytes": size * np.round(rng.uniform(1, 1e6, 5))} for size in (2, 3, 5, 6, 11)]
        return [*fixed, far, *drawn]

    def truth(self, case):
        ring, tree = [], []
        for nbytes in case["nbytes"]:      # by adding up messages, one after the other
            chunk, whole = (case["alpha"] + case["beta"] * part for part in (nbytes / case["size"], nbytes))
            ring.append(sum(chunk for _ in range(case["size"] - 1)) * 2)
            have, tree_steps = 1, 0
            while have < case["size"]:
                have, tree_steps = 2 * have, tree_steps + 1
            tree.append(2 * tree_steps * whole)
        return {"ring_seconds": np.array(ring), "tree_seconds": np.array(tree), "crossover": crossings.meeting(case)}

    def picture(self, runs, path):
        from exercises.frame.pictures import COLORS, canvas, save
        figure, axes = canvas(size=(8.6, 4.6))
        where = []
        for (case, got), color in zip(runs[1][:3], COLORS, strict=False):
            axes.loglog(case["nbytes"], got["ring_seconds"], color=color, lw=1.8, label=f"{case['size']} ranks, ring")
            axes.loglog(case["nbytes"], got["tree_seconds"], color=color, lw=1.8, ls=":",
                        label=f"{case['size']} ranks, tree")
            at = float(got["crossover"])
            axes.axvline(at, color=color, lw=0.8, alpha=0.5)
            where.append(f"{at:,.0f} bytes on {case['size']} ranks")
        axes.set(xlabel="bytes", ylabel="seconds")
        axes.legend(frameon=False)
        save(figure, path)
        return f"at 5 µs per message and 10 GB/s the ring wins from {', '.join(where)} on"
