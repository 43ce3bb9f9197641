"""19.5's known mistakes, by what they give, and what is demanded beside right numbers."""

from functools import partial

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import same

from . import choosing, drive
from .choosing import INF, attention, choose, run
from .softmaxes import attend


def m(text, means):
    return gives(text, lambda case: run(case, means=means))


def c(text, **how):
    return picked(text, partial(choose, **how))


def a(text, **how):
    return gives(text, lambda case: run(case, whole=partial(attention, **how)))


def kind(case, *kinds):
    return case["what"] in kinds


def by_features(reduce):
    return choosing.of_groups(lambda groups: reduce(groups, axis=2))


def both(text, **how):
    """Whether the own block is taken before the others are picked, or with them."""
    return [c(text, **how), c(text, together=True, **how)]


def picked(text, pick):
    return gives(text, lambda case: run(case, pick=pick))


def up_to_own(number, own):
    return number <= own


def all_blocks(number, own):
    return number < INF


def own_or_best(best, allowed, own):
    return best & allowed


def not_after(own):
    """Whether a block is the own one, or before it."""
    return np.cumsum(own[:, ::-1], 1)[:, ::-1] > 0


def as_good(case, got):
    """Whether as many are chosen before the own one, with the same products, but others."""
    if not kind(case, "choose"):
        return False
    right, found = choosing.truth(case)["chosen"], np.asarray(got["chosen"], bool)
    scores = np.zeros(right.shape)
    scores[:, :, :case["means"].shape[1]] = choosing.products(case["q"], case["means"], case["size"])
    own = np.arange(right.shape[1])[:, None] // case["size"] == np.arange(right.shape[2])
    if (found & ~not_after(own)).any() or (found.sum(2) != right.sum(2)).any():
        return False
    return same(*(np.sort(np.where(which & ~own, scores, INF), 2) for which in (found, right)), 1e-12)


def no_limit(best, allowed, own):
    return best | own


def changed(case, got):
    return f"{' and '.join(got['changed'])} isn't what it was before the call: work on a copy"


def by_values(case):
    """The outputs where blocks are chosen by the product with their mean value, as far as it has a query's features."""
    if not kind(case, "attention") or case["v"].shape[2] != case["q"].shape[2]:
        return None
    return run(case, means=lambda k, size: choosing.mean_keys(case["v"], size))


def at_means(q, k, v, which, size):
    """Where blocks before the own one are a key and a value each, their means."""
    means = [np.repeat(choosing.mean_keys(x, size), size, 1) for x in (k, v)]
    out = np.zeros(v.shape)
    for head, at in np.ndindex(q.shape[:2]):
        own = at // size * size
        seen = [block * size for block in np.flatnonzero(which[head, at]) if block < own // size]
        keys, values = (np.concatenate([mean[head, seen], x[head, own:at + 1]])
                        for mean, x in zip(means, (k, v), strict=True))
        scores = keys @ q[head, at] / q.shape[2] ** 0.5
        weights = np.exp(scores - scores.max())
        out[head, at] = weights / weights.sum() @ values
    return out


MEANS = [
    ("the keys of a block are added up, and not divided by size: the mean is asked for", by_features(np.sum)),
    ("mean_keys gives the greatest number of each feature in a block, where the mean is asked for",
     by_features(np.max)),
    ("mean_keys gives the median of each feature in a block, where the mean is asked for", by_features(np.median)),
    ("a block is known by its last key alone; its mean key tells of all of them",
     choosing.of_groups(lambda groups: groups[:, :, -1])),
    ("a block is known by its first key alone; its mean key tells of all of them",
     choosing.of_groups(lambda groups: groups[:, :, 0])),
    ("the last block is shorter, and has got a mean as well: only whole blocks have one, for only they lie wholly "
     "before anybody", choosing.last_too(lambda rest, size: rest)),
    ("the last block is shorter, and was filled up to a mean of its own, as if the rest were zeros: only whole blocks "
     "have one", choosing.last_too(lambda rest, size: size)),
    ("each mean is of keys that lie far apart: in reshape the blocks' axis comes before that of the keys of a block",
     choosing.strided),
    ("the keys that are left over were cut off at the beginning: blocks begin at 0, size, 2·size …, and what is left "
     "over lies at the end", choosing.from_the_end),
    ("mean_keys gives the mean of all keys up to a block's end, not of the block's own", choosing.of_all_before),
    ("the mean keys were made as long as 1: that of a block whose keys agree is to be longer than that of others",
     lambda k, size: choosing.unit(choosing.mean_keys(k, size))),
    ("the mean is of all heads' keys: each head has its own",
     lambda k, size: np.repeat(choosing.mean_keys(k, size).mean(0, keepdims=True), len(k), 0)),
    ("a block's keys are added up and divided by the number of all keys, not by size",
     lambda k, size: choosing.grouped(k, size).sum(2) / k.shape[1]),
    ("a block's keys are added up and divided by √size; the mean is their sum over size",
     lambda k, size: choosing.grouped(k, size).sum(2) / size ** 0.5),
    ("mean keys come in float32; all that is given is float64", choosing.single(choosing.mean_keys)),
]

CHOICES = [
    *both("blocks that aren't before a query have a score like -1e9, and a product may be below it: -inf is below all",
          blank=-1e9),
    c("the own block isn't among those that a query looks at: it always is, and counts as one of count",
      put=own_or_best),
    c("a query looks at one block too many: count - 1 beside its own, which counts as well",
      others=lambda count: count),
    c("a query looks at one block too few: count - 1 beside its own", others=lambda count: max(count - 2, 0)),
    c("all blocks are chosen with count = 1: [-0:] is everything. Take the last count - 1 by where they begin, or sort "
      "the other way round", pick=choosing.last_of_none),
    c("the own block has to compete by its mean key, which tells of later keys, and isn't chosen by all: each query "
      "looks at its own block, and chooses count - 1 of those wholly before it", before=up_to_own, put=own_or_best,
      others=lambda count: count),
    c("the own block is among those that are chosen by their mean keys, and takes a place from another: it is looked "
      "at anyway. Choose count - 1 of those wholly before it", before=up_to_own),
    *both("later blocks may be chosen as well: only those wholly before the query's own", before=all_blocks,
          put=no_limit),
    *both("later blocks have a say as well: they take places, though nobody looks at them then. Give them -inf before "
          "the sort", before=all_blocks, put=lambda best, allowed, own: best & not_after(own) | own),
    *both("blocks that aren't before a query have the score 0, and are chosen where the others' products are below 0: "
          "give them -inf, and leave them out where there are fewer than count", blank=0.0, put=no_limit),
    *both("blocks that aren't before a query have the score 0, and take the place of those with products below 0: give "
          "them -inf", blank=0.0),
    *both("where there are fewer than count - 1 blocks before a query, later ones fill the places: -inf is a score as "
          "well, and somebody is the greatest of them. Leave out what isn't before", put=no_limit),
    c("the least alike blocks are chosen: those with the greatest products are asked for", score=choosing.least_alike),
    c("blocks are chosen by the product's magnitude: one far below 0 agrees with the query least of all",
      score=choosing.absolute),
    c("products below 0 are taken for 0, and so their blocks for equals: the greater of them is asked for as well",
      score=choosing.cut_at_0),
    *[picked("the last block is shorter, and isn't there to be chosen, not even by its own queries: blocks are queries "
             "/ size, rounded up", partial(choosing.rounded_down, together=together)) for together in (False, True)],
    c("the nearest blocks are chosen, whatever their keys: that is a window", score=choosing.nearest),
    c("the earliest blocks are chosen, whatever their keys", score=choosing.earliest),
    c("blocks are chosen by the distance of their mean key from the query: by the product", score=choosing.by_distance),
    c("blocks are chosen by the angle between mean key and query: by the product, in which the mean key's length "
      "counts", score=choosing.by_angle),
    c("all heads share a choice, by the sum of their products: each head chooses by itself",
      score=choosing.heads_together),
    c("all heads have the choice of head 0: each head chooses by itself", score=choosing.of_first_head),
    c("all heads choose by the mean keys of head 0: each has its own", score=choosing.of_first_mean),
    c("the queries of a block share a choice, by their mean: each chooses by itself", score=choosing.queries_together),
    c("the queries of a block share the choice of the first of them: each chooses by itself",
      score=choosing.first_of_block),
    c("a query chooses by the sum of all queries so far: by itself alone", score=choosing.all_so_far),
    c("of blocks with the same product the later is chosen: the earlier. np.argsort(-scores, kind='stable') leaves "
      "equal ones in their order; a sorted list read backwards doesn't", pick=choosing.later_of_equals),
    c("the numbers of the blocks, in their order, are taken for their ranks: argsort says which block comes first, not "
      "at which place a block comes. Write True at those numbers, or sort twice", pick=choosing.sorted_once),
    c("with the same product as the last that is chosen others are chosen as well, and then they are more than count: "
      "a limit of the score isn't enough, the earlier of equals is asked for", pick=choosing.all_as_good),
    c("blocks choose their queries, count - 1 each: queries choose their blocks. Sort along the last axis",
      pick=choosing.by_blocks),
    c("all blocks are chosen whose product is above the mean, however many they are: the count - 1 best",
      pick=choosing.above_mean),
    *both("the last query of a block is taken for one of the next block: position t is in block t // size",
          here=lambda at, size: (at + 1) // size),
    *both("the first query of a block is taken for one of the block before: position t is in block t // size",
          here=lambda at, size: np.maximum(at - 1, 0) // size),
    c("the block just before the own one is never chosen: it lies wholly before, too",
      before=lambda number, own: number < own - 1),
    c("the first block is always looked at, beside the others: it is chosen where its mean key agrees, like any",
      put=lambda best, allowed, own: best & allowed | own | (np.arange(own.shape[1]) == 0)),
    c("nothing is chosen: each query looks at its own block alone", pick=lambda scores, n: scores == np.inf),
    c("all blocks before the own one are looked at, whatever count is", pick=lambda scores, n: scores > -INF),
    *[picked("a query's own block is t // count here: position t is in block t // size, and count is how many blocks "
             "it looks at", lambda q, means, size, count, together=together: choose(
                 q, means, size, count, here=lambda at, _: at // count, together=together))
      for together in (False, True)],
    when("of blocks with the same product others are chosen than the earlier ones: a sort leaves equal ones in their "
         "order with kind='stable', and np.argpartition never", as_good),
    picked("products are made in float32, and what they differ by is lost: all that is given is float64",
           lambda q, means, size, count: choose(q.astype(np.float32), means.astype(np.float32), size, count)),
]

ATTENTION = [
    a("within its own block a query sees later keys: 19.1's attention compares positions, so give it the queries' own, "
      "and the keys'", q_at=lambda rows, at, size: rows + at[-1] + 1),
    a("the own block's keys have their places in the block for positions, and the queries theirs in the sequence, so "
      "that later keys are seen: a block's keys stand at block · size and behind",
      k_at=lambda at, size: at - at[0]),
    a("the queries' positions are their places among those that chose the block, and not those in the sequence: the "
      "rows that you picked are the positions", q_at=lambda rows, at, size: np.arange(len(rows))),
    a("positions are places in a block, the queries' as well as the keys', so that a query sees as much of each block "
      "as of its own: positions are those in the sequence", q_at=lambda rows, at, size: rows % size,
      k_at=lambda at, size: at % size),
    a("a query doesn't see itself: of its own block it sees the keys up to its own",
      q_at=lambda rows, at, size: rows - 1),
    a("the own block isn't seen: chosen blocks are, and of the own one the keys up to the query",
      q_at=lambda rows, at, size: np.where(rows <= at[-1], -1, rows)),
    a("only the last block's softmax is left: the blocks before it are lost. Give attention what these rows have seen "
      "before", put=choosing.replaced),
    a("only the first block's softmax is left: each block replaces what came before",
      put=choosing.replaced, order=lambda blocks, whole: range(blocks)[::-1]),
    a("there is a softmax for each block, and they are added up: all keys that a query sees are under one. Give "
      "attention what these rows have seen before", put=choosing.added),
    a("there is a softmax for each block, and their mean is taken: all keys that a query sees are under one, and a "
      "block weighs as its lse says", put=choosing.added, end=choosing.by_count),
    a("each block is averaged with what came before it, whatever it weighs: lse says how much that is",
      put=choosing.halved),
    a("out is renewed with every block, and lse isn't as well: then the next block is weighed against the wrong sum",
      put=choosing.lse_of_block),
    a("at first lse is 0, as if a key with the weight 1 and zeros for values had been seen: who has seen nothing has "
      "lse -inf", nothing=(0.0, 0.0)),
    a("the own block's keys are under the softmax twice", twice=True),
    a("the rows that chose a block stand first in out, not where they came from: write to the same rows that you read",
      into=lambda rows: np.arange(len(rows))),
    a("the last block is shorter, and nobody looks at it: its queries see themselves at least. Blocks are queries / "
      "size, rounded up", order=lambda blocks, whole: range(whole)),
    a("the first block is left out, whoever has chosen it", order=lambda blocks, whole: range(1, blocks)),
    a("all heads have the keys of head 0: cut k by the head as well", keys_of=lambda k, head: k[:1]),
    a("all heads have the values of head 0: cut v by the head as well", values_of=lambda v, head: v[:1]),
    a("scores are divided by √features twice: 19.1's attention does it",
      of=lambda q, *rest: attend(q / q.shape[2] ** 0.5, *rest)),
    a("scores are multiplied by √features beforehand, and so they aren't divided by it: 19.1's attention does it, and "
      "is to", of=lambda q, *rest: attend(q * q.shape[2] ** 0.5, *rest)),
    gives("out is divided by how many blocks a query looks at: one softmax over all of them needs no mean",
          lambda case: run(case, whole=partial(attention, end=choosing.by_count))),
    gives("the choice is that of the first call: each call chooses anew", lambda case: run(case, kept=True)),
    gives("a query's choice is made by the values: by the keys", by_values),
    gives("keys choose by the queries' means: queries choose, by the keys' means",
          lambda case: run(case | {"first": {"q": case["k"], "k": case["q"]}}, kept=True)
          if kind(case, "attention") else run(case)),
    gives("the mean keys stand in the place of a chosen block's keys: they serve to choose, and then a query looks at "
          "the keys themselves", lambda case: run(case, whole=at_means)),
    gives("all keys up to the query are looked at, whatever was chosen", lambda case: run(
        case, whole=lambda q, k, v, which, size: attention(q, k, v, np.ones_like(which), size))),
]

SIGNATURES = [
    when("block_attention gives a pair, out and lse perhaps: out alone is asked for",
         lambda case, got: kind(case, "attention") and isinstance(got["out"], (list, tuple)) and len(got["out"]) == 2),
    when("choose gives numbers of blocks: True or False for each block is asked for, [heads, queries, blocks]",
         lambda case, got: kind(case, "choose") and np.asarray(got["chosen"]).dtype.kind in "iu"
         and np.shape(got["chosen"])[2] <= case["count"]),
    when(changed, lambda case, got: bool(got.get("changed"))),
    # Those that leave the choice right come first: they explain nothing else by chance.
    *ATTENTION, *[m(*of) for of in MEANS], *CHOICES]


# ---------------------------------------------------------------- what is asked for beside right numbers

def of_attention(predicate):
    return lambda case, got: not kind(case, "attention") or predicate(case, got)


def most_calls(case):
    """One for each block of each head, and its own queries apart."""
    return 2 * len(case["q"]) * -(-case["q"].shape[1] // case["size"])


def exact_run(case, sees):
    """The losses of the training run, of attention to what sees: (q, k) -> bool says."""
    def attend_to(q, k, v):
        scores = np.where(sees(q, k), q @ k.transpose(0, 2, 1) / q.shape[2] ** 0.5, -INF)
        weights = np.exp(scores - scores.max(2, keepdims=True))
        return weights / weights.sum(2, keepdims=True) @ v
    return drive.recall(case, attend_to, sees)


def last(window=INF):
    """For exact_run: the last keys up to a query's own."""
    def sees(q, k):
        at = np.arange(q.shape[1])
        return np.broadcast_to((at <= at[:, None]) & (at > at[:, None] - window), (len(q), len(at), len(at)))
    return sees


def curves(case):
    """{which keys: losses of the training run}: all, a window of as many, and chosen blocks."""
    size, count = case["size"], case["count"]

    def chosen(q, k):
        return choose(q, choosing.mean_keys(k, size), size, count)[:, :, np.arange(q.shape[1]) // size] & last()(q, k)
    return {"all": exact_run(case, last()), "window": exact_run(case, last(size * count)),
            "blocks": exact_run(case, chosen)}


def apart(case, got):
    return float(np.abs(np.subtract(got["losses"], curves(case)["blocks"])).max())


DEMANDS = [
    demand(lambda case, got: f"right, but {changed(case, got)}", lambda case, got: not got.get("changed")),
    demand(lambda case, got: f"right, but choose gives {np.asarray(got['chosen']).dtype}, not bool: as an index 1 is "
                             "the second element, and True a mask",
           lambda case, got: not kind(case, "choose") or np.asarray(got["chosen"]).dtype == bool),
    demand(lambda case, got: f"right, but attention was given {got['pairs']:,} pairs of a query and a key, where "
                             f"{choosing.wanted(case):,} are of chosen blocks: give it those queries alone that have "
                             "chosen the block, and the block's keys alone; what is hidden afterwards costs as much",
           of_attention(lambda case, got: got["pairs"] <= choosing.wanted(case))),
    demand(lambda case, got: f"right, but attention was given {got['pairs']:,} pairs of a query and a key, where "
                             f"{choosing.wanted(case):,} are of chosen blocks: the others' scores were made elsewhere, "
                             "where nobody counts them. All are 19.1's to make",
           of_attention(lambda case, got: got["pairs"] >= choosing.wanted(case))),
    demand(lambda case, got: f"right, but attention was called {got['calls']} times, for "
                             f"{most_calls(case) // 2} blocks of all heads: give it all the queries at once that have "
                             "chosen a block, not one after the other",
           of_attention(lambda case, got: got["calls"] <= most_calls(case))),
    demand(lambda case, got: f"right, but {got['bytes']:,} bytes were held at a time, with {case['time']} queries: all "
                             f"scores together would be {8 * case['time'] ** 2:,}. A query chooses by one product for "
                             "each block, with its mean key",
           lambda case, got: not kind(case, "memory") or got["bytes"] <= 4 * case["time"] ** 2),
    demand(lambda case, got: f"all right by itself, but not in a training run: {got['failed']}",
           lambda case, got: "failed" not in got),
    demand(lambda case, got: "all right by itself, but a model trained with it leaves the curve that such blocks give, "
                             f"by {apart(case, got):.1g}",
           lambda case, got: not kind(case, "training") or apart(case, got) < 1e-6)]
