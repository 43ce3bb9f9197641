"""The mistakes that are known of 19.1 and 19.2, and how they show."""

from functools import partial

import numpy as np

from exercises.frame import gives, when
from exercises.frame.comparing import same

from . import softmaxes
from .softmaxes import INF

LARGE = 1000.0      # scores whose exponentials are inf, or 0


# ---------------------------------------------------------------- 19.1: what a result looks like

def truth(case):
    """{"out", "lse"} of a case of 19.1; of what is measured: {}."""
    if case["what"] == "memory":
        return {}
    if case["what"] == "merge":
        return joined(case["one"], case["other"])
    out, lse = softmaxes.exact(*(case[name] for name in ("q", "k", "v", "q_at", "k_at")))[:2]
    return {"out": out, "lse": lse} if case.get("before") is None else joined((out, lse), case["before"])


def joined(one, other):
    """Two sets together, element by element, in long doubles."""
    out, lse = np.zeros(one[0].shape), np.full(one[1].shape, -INF)
    for at in np.ndindex(lse.shape):
        logs = [np.longdouble(of[1][at]) for of in (one, other)]
        if max(logs) > -INF:
            exps = [np.exp(log - max(logs)) for log in logs]
            lse[at] = max(logs) + np.log(sum(exps))
            out[at] = (one[0][at] * exps[0] + other[0][at] * exps[1]) / sum(exps)
    return {"out": out, "lse": lse}


def span(case):
    """The smallest and the largest score."""
    scores = softmaxes.scores_of(case["q"], case["k"])
    return scores.min(), scores.max()


def large(case):
    if case["what"] == "merge":
        finite = np.concatenate([case[name][1][case[name][1] > -INF] for name in ("one", "other")])
        return np.abs(finite).max() > LARGE
    return "q" in case and max(map(abs, span(case))) > LARGE


def up_and_down(case):
    """Some queries' scores are in the thousands, and some in the minus thousands."""
    return "q" in case and span(case)[0] < -LARGE and span(case)[1] > LARGE


def far_apart(case):
    return up_and_down(case) or ("q" in case and softmaxes.hidden_above(case))


def low(case):
    return "q" in case and span(case)[0] < -LARGE


def lost(case, got):
    """What a softmax can't give, where exponentials are inf or 0."""
    return large(case) and not np.isfinite(got["lse"][np.isfinite(truth(case)["lse"])]).all()


def too_small(case, got):
    """Something is missing, or all of it: no lse is larger than it should be, and none is nan."""
    right = truth(case)["lse"]
    return bool((got["lse"] <= right + 1e-6)[np.isfinite(right)].all())


def has_nan(got):
    return bool(np.isnan(got["out"]).any() or np.isnan(got["lse"]).any())


def rest_right(case, got):
    """All is right but where nothing is seen."""
    right = truth(case)
    somewhere = right["lse"] > -INF
    return not somewhere.all() and all(same(got[name][somewhere], right[name][somewhere], 1e-9) for name in right)


def nan_of_nothing(*kinds):
    """NaN where nothing is seen. Attention in pieces spreads it: somebody sees nothing of some block."""
    return lambda case, got: case["what"] in kinds and has_nan(got) and (case["what"] == "attention"
                                                                         or rest_right(case, got))


def all_alike(case, got):
    """Who sees nothing has the mean of all values, or a part of it."""
    return case["what"] != "merge" and rest_right(case, got) and not has_nan(got) \
        and bool((got["out"][truth(case)["lse"] == -INF] != 0).all())


def weighs(case, got):
    """Where nothing is seen lse is finite. In pieces that spoils the rest, too."""
    nothing = truth(case)["lse"] == -INF
    return bool(nothing.any() and np.isfinite(got["lse"][nothing]).all()) and (case["what"] == "attention"
                                                                              or rest_right(case, got))


def sum_for_logarithm(case, got):
    """lse is the sum of all exponentials itself, which may be inf; what becomes of out then is anybody's guess."""
    with np.errstate(over="ignore"):
        theirs = softmaxes.run(case, piece=partial(softmaxes.attend, lse=lambda top, total: np.exp(top) * total))
    return case["what"] != "merge" and same(got["lse"], theirs["lse"], 1e-9)


def close(case, got):
    """Right, to six digits."""
    right = truth(case)
    return all(same(got[name], right[name], 2e-5) for name in right)


# ---------------------------------------------------------------- 19.1: the tables

def unscaled_by(factor):
    return {"scores": lambda q, k: softmaxes.unscaled(q, k) * factor(q.shape[2])}


AXES = {        # that are taken for size's
    "queries": lambda q, k: softmaxes.unscaled(q, k) / q.shape[1] ** 0.5,
    "keys": lambda q, k: softmaxes.unscaled(q, k) / k.shape[1] ** 0.5,
    "heads": lambda q, k: softmaxes.unscaled(q, k) / len(q) ** 0.5}
ANOTHER_AXIS = "scores are divided by the root of the number of {}: √size is that of the last axis, q.shape[-1]"


def torn(q, k):
    """Scores, of a k whose last axes were reshaped in place of exchanged."""
    return q @ k.reshape(len(k), k.shape[2], -1) / q.shape[2] ** 0.5


ATTEND = [      # what is said, and the keywords of softmaxes.attend
    ("scores aren't divided by √size", unscaled_by(lambda size: 1.0)),
    ("scores are divided by size; asked for is its root", unscaled_by(lambda size: 1 / size)),
    ("scores are multiplied by √size, and are to be divided by it", unscaled_by(lambda size: size ** 0.5)),
    ("scores are divided by √width, the values'; √size is that of queries and keys",
     unscaled_by(lambda size: softmaxes.WIDTH ** -0.5)),
    ("a query doesn't see the key at its own position: k_at ≤ q_at, not <",
     {"seen": lambda q_at, k_at: k_at < q_at[:, None]}),
    ("the mask is upside down: a query sees the keys at its own position and before it, not after",
     {"seen": lambda q_at, k_at: k_at >= q_at[:, None]}),
    ("no mask: every query sees all keys", {"seen": lambda q_at, k_at: np.ones((len(q_at), len(k_at)), bool)}),
    ("the mask goes by the places in the arrays, as np.tri's does: who sees what is a matter of positions, q_at and "
     "k_at", {"seen": lambda q_at, k_at: np.tri(len(q_at), len(k_at), dtype=bool)}),
    ("the mask comes after the softmax: the weights of what is seen don't add up to 1 any more. Scores that aren't "
     "seen are -inf before it", {"late": True}),
    ("what isn't seen has score 0, not -inf: exp(0) is 1, and it counts", {"hidden": 0.0}),
    ("out isn't divided by the sum of the exponentials", {"mean": False}),
    ("lse lacks the greatest score: it was subtracted within the exponentials, so the logarithm gets it back",
     {"lse": lambda top, total: np.log(total)}),
    ("lse is the sum of the exponentials, not its logarithm", {"lse": lambda top, total: total}),
    ("the lse of a query that sees nothing is -inf, the logarithm of 0: so it weighs nothing beside other keys",
     {"empty": (0.0, 0.0)}),
    ("lse is the greatest score: the logarithm of the sum is missing", {"lse": lambda top, total: top}),
    ("the greatest score is added within the logarithm: it is log Σ exp(s - m), plus m",
     {"lse": lambda top, total: np.log(top + total)}),
    ("the greatest score is subtracted from the logarithm; it must be added",
     {"lse": lambda top, total: np.log(total) - top}),
    ("lse is a logarithm to base 2: the natural one was asked for",
     {"lse": lambda top, total: (top + np.log(total)) / np.log(2)}),
    ("the greatest is taken along the wrong axis: over the queries of each key, which tears a row's scores apart. It "
     "is each row's greatest, over its keys", {"top": lambda scores: scores.max(1, keepdims=True)}),
    *[(ANOTHER_AXIS.format(axis), {"scores": scores}) for axis, scores in AXES.items()],
    ("k is reshaped, which tears its rows: exchange its last two axes, k.transpose(0, 2, 1)", {"scores": torn}),
]

MERGE = [       # what is said, and the keywords of softmaxes.merge
    ("the mean of the two means: each weighs as much as its keys' exponentials, exp(lse - the lse of all)",
     {"weigh": softmaxes.ones_weight(0.5, 0.5)}),
    ("the two means are added up: they are to be weighed, by exp(lse - the lse of all)",
     {"weigh": softmaxes.ones_weight(1.0, 1.0)}),
    ("the means are weighed by lse: weights are exponentials of it", {"weigh": softmaxes.by_logarithm}),
    ("the weights are exchanged: each mean is weighed by the other's lse", {"weigh": softmaxes.crossed}),
    ("the first mean keeps its old weight: with other keys beside it, it counts less, exp(its lse - the new lse)",
     {"weigh": softmaxes.first_stays}),
    ("the second mean isn't weighed: it counts exp(its lse - the new lse)", {"weigh": softmaxes.second_whole}),
    ("the weights don't add up to 1: exp(lse - the greater lse) is to be divided by the sum of both",
     {"weigh": softmaxes.undivided}),
    ("the two lse are added: they are logarithms of sums, and it is the sums that add up",
     {"lse": np.add}),
    ("the two lse are added, and the means weighed by that: they are logarithms of sums, and the sums add up",
     {"lse": np.add, "weigh": lambda one, other, log: softmaxes.shares(one, other, one + other)}),
    ("the new lse is the greater of the two, and the means are weighed by that: then the weights don't add up to 1",
     {"lse": np.maximum, "weigh": softmaxes.undivided}),
    ("the new lse is the greater of the two: right within log 2, and the rest adds up",
     {"lse": np.maximum}),
    ("the new lse is the mean of the two", {"lse": lambda one, other: (one + other) / 2}),
]

LOOP = [        # what is said, and keywords of softmaxes.run
    ("the keys behind the last full block are lost: the last block may be shorter", {"cut": softmaxes.full_blocks}),
    ("blocks overlap: the first key of the next one is in both", {"cut": softmaxes.overlapping}),
    ("the first block's keys are lost", {"cut": softmaxes.without_first}),
    ("only the first block is attended to: is a return within the loop?", {"cut": softmaxes.first_only}),
    ("`before` is lost: what was seen of other keys counts", {"start": lambda before: None}),
    ("`before` is counted twice: once at the beginning, once at the end",
     {"end": lambda state, before: state if before is None else softmaxes.merge(state, before)}),
    ("what was found so far is dropped with each block: the result is the last block's",
     {"put": lambda one, other: other}),
    ("all blocks have the positions of the first one: k_at is to be cut like the keys",
     {"places": lambda k_at, first, last: k_at[:last - first]}),
    ("the mean over the blocks, as if all weighed the same: each has its lse for that",
     {"whole": softmaxes.mean_of_pieces}),
    ("the sum of exponentials isn't made smaller where the greatest score grows: what was added so far is in units of "
     "the old one", {"whole": softmaxes.running(scale_sum=False)}),
    ("the sum of values isn't made smaller where the greatest score grows: what was added so far is in units of the "
     "old one", {"whole": softmaxes.running(scale_mean=False)}),
    ("where the greatest score grows, what was added so far isn't made smaller: it is in units of the old one",
     {"whole": softmaxes.running(False, False)}),
]


def in_the_loop(how):
    """Hypothesis: a mistake of attention's own, where merge by itself is right."""
    return lambda case: softmaxes.run(case, **how) if case["what"] == "attention" else None


LEFT_OUT = ("a block of keys is left out of which some are seen: positions are in any order, and neither a block's "
            "first key nor its last nor the block before it says that nobody sees the rest")

FORWARD = [
    when("wrong where a key that a query doesn't see has a score far above all that it sees: subtracted is the "
         "greatest score of all keys, and nothing but zeros is left. Put -inf there first, and then take the greatest",
         lambda case, got: "q" in case and softmaxes.hidden_above(case)),
    *[gives(LEFT_OUT, lambda case, which=which: in_the_loop({"cut": softmaxes.not_later(case, which)})(case))
      for which in (0, -1)],
    when("nan: who sees none of these keys has -inf for a greatest score, and -inf - -inf is nan. Such queries have "
         "out 0 and lse -inf", nan_of_nothing("attend", "attention")),
    when("nan: where neither set holds anything that is seen, both lse are -inf, and -inf - -inf is nan",
         nan_of_nothing("merge", "attention")),
    when("nan: where nothing is seen there is -inf, and -inf - -inf is nan, in attend and in merge",
         nan_of_nothing("attend", "merge", "attention")),
    when("a query that sees nothing looks at everything: with a large negative number in place of -inf the greatest "
         "score is that number, too, and all keys weigh the same. Its out is 0, its lse -inf", all_alike),
    when("the greatest score so far begins at 0: where all scores are far below, all exponentials are 0. Begin with "
         "-inf, or with the first block",
         lambda case, got: case["what"] == "attention" and low(case) and lost(case, got)),
    when("the greatest score of all is subtracted, not each row's own: rows far below it have nothing but zeros",
         lambda case, got: far_apart(case) and too_small(case, got)),
    when("exp(lse) is inf where scores are in the thousands, and 0 where they are in the minus thousands: only the "
         "difference of two lse may go into exp",
         lambda case, got: case["what"] in ("merge", "attention") and lost(case, got)),
    when("scores in the thousands: exp overflows, or all exponentials are 0. Subtract the greatest score of each row "
         "first", lambda case, got: case["what"] != "merge" and lost(case, got)),
    *[gives(text, lambda case, how=how: softmaxes.run(case, piece=partial(softmaxes.attend, **how)))
      for text, how in ATTEND],
    gives("softmax along the wrong axis: over the queries of each key. A query's weights add up to 1, over its keys",
          lambda case: softmaxes.run(case, piece=softmaxes.over_queries)),
    *[gives(text, in_the_loop(how)) for text, how in LOOP],
    *[gives(text, lambda case, how=how: softmaxes.run(case, put=partial(softmaxes.merge, **how)))
      for text, how in MERGE],
    when("lse is the sum of the exponentials, not its logarithm", sum_for_logarithm),
    when("the lse of a query that sees nothing is a finite number: it is -inf, the logarithm of 0. Any other one "
         "weighs something beside the scores of other keys, which may be far below it", weighs),
    when("right to six digits only: something is kept in float32, or a small number is added to a sum. Sums of many "
         "blocks need all digits that there are", close),
]


# ---------------------------------------------------------------- 19.2

def gradients(case):
    """{"dq", "dk", "dv"}, or {"weights"}, of a case of 19.2; of what is measured: {}."""
    if case["what"] == "memory":
        return {}
    mine, given = slice(*case["mine"]), [case[name] for name in ("q", "k", "v", "q_at", "k_at")]
    if case["what"] == "weights":
        *_, seen, weights = softmaxes.exact(*given)
        found = np.zeros((*case["q"].shape[:2], len(case["k_at"])))
        for head, t in np.ndindex(found.shape[:2]):
            found[head, t, seen[t]] = weights[head][t]
        return {"weights": found[:, :, mine]}
    dq, dk, dv = softmaxes.exact_gradients(*given, case["dout"], mine)
    return {"dq": dq, "dk": dk[:, mine], "dv": dv[:, mine]}


def nan_in(case, got):
    return any(np.isnan(got[name]).any() or np.isinf(got[name]).any() for name in gradients(case))


def nan_of_empty(case, got):
    """Of the weights only those of queries that see no key at all; of gradients any."""
    empty = case["lse"] == -INF
    return nan_in(case, got) and (case["what"] == "backward" or bool(np.isfinite(got["weights"][~empty]).all()))


def near(case, got):
    return all(same(got[name], value, 2e-5) for name, value in gradients(case).items())


def mask_of(seen):
    return {"p": partial(softmaxes.weights, seen=seen)}


def scaled(*powers):
    return {"scale": powers}


def last_of(shares):
    return shares[-1]


WEIGHTS = [     # what is said, and keywords of softmaxes.backward: those that the weights show by themselves
    ("scores aren't divided by √size in backward: the weights made again are those of another attention",
     {"p": partial(softmaxes.weights, scores=softmaxes.unscaled)}),
    ("scores are divided by size; asked for is its root",
     {"p": partial(softmaxes.weights, scores=lambda q, k: softmaxes.unscaled(q, k) / q.shape[2])}),
    ("no mask in backward: keys that forward didn't see have weights", mask_of(lambda q_at, k_at: np.ones(
        (len(q_at), len(k_at)), bool))),
    ("a query doesn't see the key at its own position: k_at ≤ q_at, not <",
     mask_of(lambda q_at, k_at: k_at < q_at[:, None])),
    ("the mask is upside down: a query sees the keys at its own position and before it, not after",
     mask_of(lambda q_at, k_at: k_at >= q_at[:, None])),
    ("the mask goes by the places in the arrays, as np.tri's does: who sees what is a matter of positions, q_at and "
     "k_at", mask_of(lambda q_at, k_at: np.tri(len(q_at), len(k_at), dtype=bool))),
    ("a softmax of these keys alone: lse is that of all keys, and exp(score - lse) the weight among all",
     {"p": softmaxes.renewed}),
    ("exp(score) is divided by lse: lse is the sum's logarithm, so it is subtracted before exp",
     {"p": lambda q, k, q_at, k_at, lse: np.where(softmaxes.sees(q_at, k_at), np.exp(softmaxes.scores_of(q, k))
                                                  / lse[..., None], 0)}),
    *[(ANOTHER_AXIS.format(axis), {"p": partial(softmaxes.weights, scores=scores)}) for axis, scores in AXES.items()],
    ("lse is added; weights are exp(score - lse)",
     {"p": lambda q, k, q_at, k_at, lse: softmaxes.weights(q, k, q_at, k_at, -lse)}),
]

BACKWARD = [
    ("D is missing: a weight grows at the cost of the row's others, and s̄ = p (p̄ - D)",
     {"D": lambda p, by_p, out, dout: 0.0}),
    ("D is taken over the keys of a block: it is Σ p p̄ over all keys, which Σ ō·o is, at once",
     {"D": softmaxes.of_these_keys}),
    ("D is the sum of ō alone: it is Σ ō·o", {"D": lambda p, by_p, out, dout: dout.sum(-1, keepdims=True)}),
    ("D is Σ o·o: it is Σ ō·o", {"D": lambda p, by_p, out, dout: (out * out).sum(-1, keepdims=True)}),
    ("D is the mean over the features of ō·o; it is the sum",
     {"D": lambda p, by_p, out, dout: (dout * out).mean(-1, keepdims=True)}),
    ("D is one number for all: Σ ō·o is over the features, and each query of each head has its own",
     {"D": lambda p, by_p, out, dout: (dout * out).sum()}),
    ("D is summed over the heads, too: Σ ō·o is over the features, and each query of each head has its own",
     {"D": lambda p, by_p, out, dout: (dout * out).sum((0, 2))[:, None]}),
    ("D is added: s̄ = p (p̄ - D)", {"s": lambda p, by_p, D: p * (by_p + D)}),
    ("the sign of s̄: it is p (p̄ - D), not p (D - p̄)", {"s": lambda p, by_p, D: p * (D - by_p)}),
    ("s̄ lacks p: it is p (p̄ - D)", {"s": lambda p, by_p, D: by_p - D}),
    ("D isn't weighed by p: s̄ = p (p̄ - D), not p p̄ - D", {"s": lambda p, by_p, D: p * by_p - D}),
    ("only the diagonal of the softmax's Jacobian, p (1 - p): a score moves the weights of all the row's keys",
     {"s": lambda p, by_p, D: p * (1 - p) * by_p}),
    ("dq lacks 1/√size: scores were divided by it", scaled(0.0, -0.5, 0.0)),
    ("dk lacks 1/√size: scores were divided by it", scaled(-0.5, 0.0, 0.0)),
    ("dq and dk lack 1/√size: scores were divided by it, so their gradients are, too", scaled(0.0, 0.0, 0.0)),
    ("dq and dk are divided by √size twice", scaled(-1.0, -1.0, 0.0)),
    ("dv is divided by √size: values have no part in scores", scaled(-0.5, -0.5, -0.5)),
    ("dq is the last block's share: each block adds to it", {"dq": last_of}),
    ("dq is the mean over the blocks: each adds its share to it", {"dq": lambda shares: sum(shares) / len(shares)}),
    ("dv goes by p̄'s way: it is pᵀ ō, of the weights, not s̄ᵀ ō",
     {"dv": lambda p, s, dout: s.transpose(0, 2, 1) @ dout}),
    ("dv goes by the scores' way: it is pᵀ ō, of the weights, not s̄ᵀ ō / √size",
     {"dv": lambda p, s, dout: s.transpose(0, 2, 1) @ dout, "scale": (-0.5, -0.5, -0.5)}),
    ("dv is pᵀ ō, of the gradient by out, and yours lacks the weights of queries: are they all 1?",
     {"dv": lambda p, s, dout: np.ones_like(p).transpose(0, 2, 1) @ dout}),
    ("dk is made of the weights: it is s̄ᵀ q / √size", {"dk": None}),
    ("the keys behind the last full block have no gradients: the last block may be shorter",
     {"cut": softmaxes.full_blocks}),
    ("all blocks have the positions of the first one: k_at is to be cut like the keys",
     {"places": lambda k_at, first, last: k_at[:last - first]}),
]


def of_weights(case):
    """Hypothesis: dk = pᵀ q / √size."""
    if case["what"] != "backward":
        return None
    kept = {}

    def s(p, by_p, D):
        kept["p"] = p
        return softmaxes.by_scores(p, by_p, D)
    return softmaxes.run_backward(case, s=s, dk=lambda slope, q, k: kept["p"].transpose(0, 2, 1) @ q)


def in_backward(how):
    """Hypothesis: a mistake that the weights by themselves don't show."""
    return lambda case: softmaxes.run_backward(case, **how) if case["what"] == "backward" else None


GRADIENT = [
    *[gives(LEFT_OUT, lambda case, which=which: in_backward({"cut": softmaxes.not_later(case, which)})(case))
      for which in (0, -1)],
    *[gives(text, lambda case, how=how: softmaxes.run_backward(case, **how)) for text, how in WEIGHTS],
    when("nan: a query that sees no key at all has lse -inf, and -inf - -inf is nan. What isn't seen has weight 0, "
         "whatever lse is", nan_of_empty),
    when("exp overflows before the mask comes: scores of keys that aren't seen may be far above lse, and inf · 0 is "
         "nan. Give exp a -inf there", nan_in),
    *[gives(text, of_weights if None in how.values() else in_backward(how)) for text, how in BACKWARD],
    gives("D is taken over these keys alone: it is Σ p p̄ over all keys, which Σ ō·o is, at once",
          lambda case: in_backward({"D": softmaxes.of_these_keys})(case | {"block": 10 ** 6})),
    when("right to six digits only: something is kept in float32, or a small number is added", near),
]
