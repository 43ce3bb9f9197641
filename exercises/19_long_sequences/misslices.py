"""19.6's known mistakes, by what they give, and what is demanded beside right numbers."""

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import all_leaves, same

from . import slicing
from .slicing import HEADS, LENGTH, LONG, SIZE, everybody, of_everybody, of_those, run, softmax
from .softmaxes import INF

NUMBER = 8      # bytes


def f(text, **how):
    return gives(text, lambda case: run(case, **how))


def said_by(text, which):
    """A mistake in which slices' words dk and dv are made of; in both of them, or in one."""
    gather = of_those(which)
    return [f(text.format("dk holds"), gather=gather, gather_dv=of_everybody),
            f(text.format("dv holds"), gather_dv=gather), f(text.format("dk and dv hold"), gather=gather)]


def standing(text, at):
    return f(text, gather=of_those(everybody, at))


def scaled(power):
    """For `scale`: q's features to a power."""
    return lambda q, k, v: q.shape[2] ** power


def nothing(x):
    return np.full(x.shape, np.nan)


def lost_out(dq, dk, dv):
    """What comes where Σ dout · out is made of an out that is the caller's by now: nan."""
    return nothing(dq), nothing(dk), dv


def nearly(case, got):
    """Whether all is there, within half a percent."""
    expected = all_leaves(slicing.truth(case))
    found = all_leaves(got, slicing.truth(case))
    return all(same(found[label], x, 5e-3) for label, x in expected.items())


def larger(case, got):
    """Whether gradients of keys have as many positions as there are up to the slice's end."""
    sizes = [(np.shape(x)[1], int(end), one["k"].shape[1]) for of, batch in zip(got["dk"], case["batches"], strict=True)
             for x, one, end in zip(of, batch["slices"], np.cumsum(slicing.lengths(batch)), strict=True)
             if x is not None]
    return any(own < end for _, end, own in sizes) and all(found == end for found, end, _ in sizes)


FORWARD = [
    f("within a slice a query sees later keys as well: those of earlier slices all, and of its own the ones up to its "
      "own", mask=slicing.all_that_are_there),
    f("the mask takes a query's place in its slice for its position: it stands behind all earlier slices, and sees "
      "their keys all", mask=slicing.by_place_in_slice),
    f("each slice has the mask of its own triangle, earlier ones, too, whose keys are before all of the slice's "
      "queries: count the keys' positions on from slice to slice", mask=slicing.by_places_in_slices),
    f("the mask is upside down: it hides what is before a query, and shows what comes later",
      mask=slicing.later_than_own),
    f("a query doesn't see itself, and the first one of all sees nothing: keys up to its own",
      mask=slicing.moved(lambda first, own, number, lengths: first - 1)),
    f("a query sees one key too many, that of the position behind it",
      mask=slicing.moved(lambda first, own, number, lengths: first + 1)),
    f("the queries' positions are the slice's number times its length: slices may have different lengths, so count "
      "what stands before", mask=slicing.moved(lambda first, own, number, lengths: number * own)),
    f("the queries' positions are the slice's number times the first one's length: slices may have different lengths, "
      "so count what stands before", mask=slicing.moved(lambda first, own, number, lengths: number * lengths[0])),
    f("the queries' positions begin at the slice's number, and not behind all positions of earlier slices",
      mask=slicing.moved(lambda first, own, number, lengths: number)),
    f("a slice sees its own keys alone: its queries look at those of all earlier slices, too",
      looks_at=lambda j: [j]),
    f("a slice sees its own keys and those of the slice before: all earlier ones have left theirs",
      looks_at=lambda j: range(max(0, j - 1), j + 1)),
    f("a slice sees its own keys and those of the first slice: all earlier ones have left theirs",
      looks_at=lambda j: [*range(min(j, 1)), j]),
    f("the first slice's keys are seen by nobody but itself", looks_at=lambda j: range(min(j, 1), j + 1)),
    f("keys and values are put together in the reverse order, this slice's first, and the mask is that of positions in "
      "order", joined=lambda which: which[::-1], values_joined=lambda which: which[::-1]),
    f("keys are put together in the reverse order, and values in order: weights meet others' values",
      joined=lambda which: which[::-1]),
    f("values are put together in the reverse order, and keys in order: weights meet others' values",
      values_joined=lambda which: which[::-1]),
    f("there is a softmax over earlier slices and one over the own, and they are added up: all keys that a query sees "
      "are under one", weights=slicing.in_two),
    f("there is a softmax over earlier slices and one over the own, and their mean is taken: all keys that a query "
      "sees are under one", weights=slicing.halved),
    f("the softmax is over queries: a query's weights add up to 1, along the last axis",
      weights=lambda s, mask, first: slicing.raised(np.where(mask, s, -INF), axis=1)),
    f("what isn't seen is left out after the softmax, and its share is lost: -inf before it",
      weights=slicing.hidden_afterwards),
    f("what isn't seen has a score like -1e9, and what is seen may have a smaller one: -inf",
      weights=lambda s, mask, first: softmax(s, mask, first, -1e9)),
    f("what isn't seen has the score 0, and a weight: its score is -inf",
      weights=lambda s, mask, first: softmax(s, mask, first, 0.0)),
    f("exp(score) is too large for float64, or 0 for all keys: subtract each query's greatest score first",
      weights=lambda s, mask, first: slicing.raised(np.where(mask, s, -INF), lambda x: 0.0)),
    f("a query's greatest score is looked for among all keys that are there: one that it doesn't see may be far above "
      "what it sees, which then has no weight. Hide first", weights=slicing.hidden_too_late),
    f("one greatest score is subtracted from all queries' scores, and some queries' weights are 0 then: each query has "
      "its own", weights=lambda s, mask, first: slicing.raised(np.where(mask, s, -INF), lambda x: x.max())),
    f("scores aren't divided by √features", scale=scaled(0.0), powers=(0.0, 0.0, 0.0)),
    f("scores are divided by features, not by their root", scale=scaled(-1.0), powers=(-1.0, -1.0, 0.0)),
    f("scores are multiplied by √features", scale=scaled(0.5), powers=(0.5, 0.5, 0.0)),
    f("scores aren't divided by √features in forward; in backward they are", scale=scaled(0.0)),
    f("scores are divided by the root of v's width: by that of q's features", scale=lambda q, k, v: v.shape[2] ** -0.5),
    f("scores are divided by the root of how many heads there are: by that of q's features",
      scale=lambda q, k, v: len(q) ** -0.5),
    f("scores are divided by the root of how many keys there are: by that of q's features",
      scale=lambda q, k, v: k.shape[1] ** -0.5),
]

PLACES = [
    *[f("all micro-batches have one place: several are under way at a time, and each has its own", number=lambda k: 0,
        shorter=shorter) for shorter in (False, True)],
    f("what is said of keys and values has one place for all micro-batches, whose backwards may take turns: each has "
      "its own", sums=lambda place: 0),
    f("there is a place for one micro-batch, that came last: several are under way at a time, and each has its own",
      alone=True),
    f("all layers have one place: what is a default argument, or stands in the class and not in __init__, is there "
      "once for all", shared=True),
    f("backward goes through the micro-batch that came last in forward: it is told which one",
      back=lambda k, came: came[-1]),
    f("keys stay when a micro-batch has had all its backwards, and the next one of this number sees them",
      keys_stay=True),
    f("what was said of keys and values stays when a micro-batch has had all its backwards, and is added to that of "
      "the next one of this number", said_stays=True),
    f("backward takes the first slice that is there: it comes for the last one, whose keys nobody looks at any more",
      taken=0),
]

SAID = [
    *said_by("{} what the slice's own queries say, and nothing of what later slices' have said: keep that, and add it",
             lambda spoken: spoken[-1:]),
    *said_by("{} what later slices' queries say, and not what its own do",
             lambda spoken: [0 * spoken[-1], *spoken[:-1]]),
    *said_by("{} twice what the slice's own queries say", lambda spoken: [*spoken, spoken[-1]]),
    *said_by("{} twice what later slices' queries say: what is kept is the sum already",
             lambda spoken: [*spoken, *spoken[:-1]]),
    *said_by("{} what the slice's own queries and those of the next slice say: what was said before is replaced, and "
             "not added to", lambda spoken: spoken[-2:]),
    *said_by("{} what the last slice's queries say, and nothing of what others say afterwards",
             lambda spoken: spoken[:1]),
    *said_by("{} what the last slice's and the own queries say: all slices in between see these keys as well",
             lambda spoken: [*spoken[:1], *spoken[1:][-1:]]),
    f("dk and dv are means over the slices that have said something: a gradient is their sum", gather=slicing.mean),
    standing("dk and dv are cut out at the slice's number times its length: slices may have different lengths, so "
             "count what stands before", lambda first, own, number, lengths, seen: (number * own, (number + 1) * own)),
    standing("dk and dv are cut out at the slice's number times the first one's length: slices may have different "
             "lengths, so count what stands before",
             lambda first, own, number, lengths, seen: (number * lengths[0], number * lengths[0] + own)),
    standing("dk and dv of all slices are cut out at the end, where those of the last one stand: the slice's own stand "
             "behind those of earlier slices", lambda first, own, number, lengths, seen: (seen - own, seen)),
    standing("dk and dv of all slices are cut out at the beginning: the slice's own stand behind those of earlier "
             "slices", lambda first, own, number, lengths, seen: (0, own)),
    standing("dk and dv begin at the slice's number, and not behind all positions of earlier slices",
             lambda first, own, number, lengths, seen: (number, number + own)),
    f("what slices say of keys is added end to end: an earlier slice says nothing of the last keys, so that it "
      "begins where the others begin", gather=slicing.at_its_end),
]

BACKWARD = [
    f("dq has no factor 1/√features: it is in the scores, and so in dq and dk", powers=(0.0, -0.5, 0.0)),
    f("dk has no factor 1/√features: it is in the scores, and so in dq and dk", powers=(-0.5, 0.0, 0.0)),
    f("neither dq nor dk has the factor 1/√features, which is in the scores", powers=(0.0, 0.0, 0.0)),
    f("dv has a factor 1/√features: that belongs to the scores, and so to dq and dk", powers=(-0.5, -0.5, -0.5)),
    f("dk has the factor 1/√features twice: q was divided by it already", powers=(-0.5, -1.0, 0.0)),
    f("dq and dk have the factor 1/√features twice", powers=(-1.0, -1.0, 0.0)),
    f("dq holds what comes by the own slice's keys, and nothing by those of earlier slices",
      to_dq=lambda s, first: s * (np.arange(s.shape[2]) >= first)),
    f("dq holds what comes by the keys of earlier slices, and nothing by the own ones",
      to_dq=lambda s, first: s * (np.arange(s.shape[2]) < first)),
    f("what a softmax's gradient subtracts, Σ p p̄ of each query, is missing", D=lambda p, by_p, *rest: 0.0),
    f("what a softmax's gradient subtracts, Σ p p̄, is of the own slice's keys alone: of all that the query sees",
      D=slicing.own_sum),
    f("what a softmax's gradient subtracts is the mean of p p̄ over keys: their sum", D=slicing.mean_of_all),
    f("what a softmax's gradient subtracts is the sum of p p̄ over queries: over keys, of each query",
      D=lambda p, by_p, *rest: (p * by_p).sum(1, keepdims=True)),
    f("what a softmax's gradient subtracts is the sum of p̄ over keys: of p p̄",
      D=lambda p, by_p, *rest: by_p.sum(2, keepdims=True)),
    f("dv is made by the scores' gradient: values are weighed by p", dv=lambda s, p, q, dout: s.swapaxes(1, 2) @ dout),
    f("dk is made by the weights: by the scores' gradient", dk=lambda s, p, q, dout: p.swapaxes(1, 2) @ q),
    f("dq and dk have the wrong sign: p (p̄ - Σ p p̄)", signs=(-1, -1, 1)),
    f("dq and dk are exchanged: (dq, dk, dv)", end=lambda dq, dk, dv: (dk, dq, dv)),
    f("backward makes the weights again, and no mask: within the slice later keys get a share",
      again=(slicing.all_that_are_there, softmax)),
    f("backward makes the weights again, with the queries' places in their slice for positions",
      again=(slicing.by_place_in_slice, softmax)),
    f("out is kept for backward, and the caller has written into it meanwhile: what is returned is the caller's. Keep "
      "a copy, or make Σ p p̄ of the weights", end=lost_out),
]

SIGNATURES = [
    when(lambda case, got: f"{' and '.join(got['changed'])} isn't what it was before the call: work on a copy",
         lambda case, got: bool(got["changed"])),
    when("dk and dv are of all positions up to the slice's end: give those of the slice's own, and keep the others, "
         "for the backwards of earlier slices", larger),
    # Those that leave more of it right come first: what they explain isn't half of something else.
    *SAID, *BACKWARD, *PLACES, *FORWARD,
    when("right to a few digits: is something made in float32, or a small number added? All that is given is float64",
         nearly),
    when(lambda case, got: "one micro-batch in slices of the same length goes well, and it fails with "
                           f"{described(case)}: {got['said']}", lambda case, got: got["failed"]),
]


def described(case):
    """What is particular with a case."""
    numbers = [batch["number"] for batch in case["batches"]]
    sizes = " and ".join(str(slicing.lengths(batch)) for batch in case["batches"][:2])
    if len(numbers) == 1:
        return f"{case['what']}, {sizes}"
    return f"{case['what']}: numbers {', '.join(map(str, numbers))}, slices of {sizes} … positions"


# ---------------------------------------------------------------- what is asked for beside right numbers

POSITION = HEADS * 2 * SIZE * NUMBER        # bytes of a position's key and value
SCORES = HEADS * LENGTH * NUMBER            # of a slice's scores with one key


def first(got):
    """Of the long sequence there is one row of steps."""
    return got["metered"][0]


def of_long(predicate):
    """A demand on the long sequence."""
    return lambda case, got: case["what"] != "memory" or case["slices"] != LONG or predicate(first(got))


def too_much(row):
    """[(slices whose backward hasn't come, bytes held)] where more is held than when so many had come forward, and
    keys, values and gradients of all."""
    forward, backward = row["held"][:LONG], row["held"][LONG:]
    allowed = forward[::-1][1:] + 3 * LONG * LENGTH * POSITION
    return [(LONG - 1 - n, held) for n, (held, may) in enumerate(zip(backward, allowed, strict=False)) if held > may]


def said_of(much):
    return much[0], LONG, kib(much[1])


def kib(number):
    return f"{number / 1024:,.0f} KiB"


FORWARD_PEAK = 12 * SCORES * LONG * LENGTH + 6 * POSITION * LONG * LENGTH
BACKWARD_PEAK = 12 * SCORES * LENGTH + 6 * POSITION * LONG * LENGTH
LEFT = LENGTH * HEADS * SIZE * NUMBER        # of a slice's queries

DEMANDS = [
    demand(lambda case, got: f"all right by itself, but not with {case['slices']} slices of {case['length']} positions "
                             f"each: {got['failed']}",
           lambda case, got: case["what"] != "memory" or "failed" not in got),
    demand(lambda case, got: f"right, but {' and '.join(got['changed'])} isn't what it was before the call: work on a "
                             "copy", lambda case, got: not got.get("changed")),
    demand(lambda case, got: "right, but {} is a view of an array that is {:.0f} times as large, and lives as long: "
                             "give a copy".format(*next(iter(first(got)["views"].items()))),
           of_long(lambda row: not row["views"])),
    demand(lambda case, got: f"right, but {max(row['left'] for row in got['metered']):,} bytes are held when all "
                             "micro-batches have had all their backwards: nobody needs anything of them then",
           lambda case, got: case["what"] != "memory" or all(row["left"] < LEFT for row in got["metered"])),
    demand(lambda case, got: "right, but with {} of {} slices left {} are held: what only one slice's backward needs, "
                             "its weights before all, goes with it. If it stays until the micro-batch's last backward, "
                             "a stage holds whole sequences".format(*said_of(too_much(first(got))[-1])),
           of_long(lambda row: not too_much(row))),
    demand(lambda case, got: f"right, but a slice's forward takes {kib(max(first(got)['peaks'][:LONG]))} at a time: "
                             f"its {LENGTH} queries have {kib(SCORES * LONG * LENGTH)} of scores with all "
                             f"{LONG * LENGTH} keys. Are earlier slices' queries multiplied again?",
           of_long(lambda row: max(row["peaks"][:LONG]) <= FORWARD_PEAK)),
    demand(lambda case, got: f"right, but the first slice's backward takes {kib(first(got)['peaks'][-1])} at a time: "
                             f"its {LENGTH} queries have {kib(SCORES * LENGTH)} of scores with the {LENGTH} keys that "
                             "they see. Are later keys multiplied as well, and hidden?",
           of_long(lambda row: row["peaks"][-1] <= BACKWARD_PEAK)),
]
