"""22.1 number by number, and what known mistakes would give."""

import math

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import same

RANKS = 3        # of the descent, which is drawn
LONG = 1001      # numbers, of the case in which bytes are looked at
SLACK = 16       # bytes that a message may have beside bits and scale


# ---------------------------------------------------------------- cases

def draw(rng, ranks, n, steps, zeros=False):
    """[gradients of each step] for each rank, none like another's. zeros: some numbers are 0, and rank 0's first
    gradient and its last are nothing else."""
    found = []
    for rank in range(ranks):
        grads = [(rank + 1.0) * (rng.standard_normal(n) + 0.3 * rng.standard_normal()) for _ in range(steps)]
        if zeros:
            grads[0][rng.permutation(n)[:n // 3]] = 0.0
            grads[0] *= rank > 0
            grads[-1] *= rank > 0
            grads[1][rng.permutation(n)[:n // 3]] = 0.0
        found.append(grads)
    return found


def cases(rng, ranks):
    vectors = [rng.standard_normal(n) * 10.0 ** e + shift for n, e, shift in ((13, 0, 0.2), (8, -3, 0.0), (1, 1, -20.0),
                                                                              (30, 0, -0.4))]
    vectors.append(np.where(rng.random(11) < 0.4, 0.0, rng.standard_normal(11)))
    vectors[-1][:2] = 0.0, -0.0
    found = [[{"what": "pack", "v": v}] * ranks for v in [*vectors, np.zeros(5)]]
    for objects in (((13, 4, False),), ((13, 5, False), (13, 3, False)), ((16, 3, True),), ((LONG, 2, False),)):
        drawn = [draw(rng, ranks, *one) for one in objects]
        found.append([{"what": "sum", "grads": [grads[rank] for grads in drawn]} for rank in range(ranks)])
    valley = {"what": "valley", "start": np.array([1.0, 0.37 + 0.1 * rng.random()]), "slope": 0.5, "rate": 0.05,
              "steps": 60}
    return [*found, *([valley] * n for n in [ranks] if n == RANKS)]


# ---------------------------------------------------------------- rightly, and with mistakes

def mean(v):
    return math.fsum(abs(x) for x in v) / len(v)


def not_negative(v):
    return np.array([x >= 0 for x in v])


def plus_or_minus(bits, scale):
    return np.array([scale if bit else -scale for bit in bits])


def what_was_not_sent(wanted, grad, sent, left, total, size):
    return wanted - sent


def added(sents, scales, bits, rank):
    return sum(sents)


def itself(wanted, grad):
    return wanted


def with_rest(grad, left):
    return grad + left


def packed(bits):
    """Eight to a byte, the first one highest."""
    rows = np.pad(bits.astype(int), (0, -len(bits) % 8)).reshape(-1, 8)
    return (rows @ 2 ** np.arange(7, -1, -1)).astype(np.uint8)


def run(case, scale=mean, bit=not_negative, value=plus_or_minus, keep=what_was_not_sent, total=added,
        shared=False, scaled=itself, late=False, ask=with_rest):
    """Outputs of all ranks; the keywords are the mistakes."""
    what = case[0]["what"]
    if what == "pack":
        found = []
        for rank in case:
            bits = bit(rank["v"])
            found.append({"scale": float(scale(rank["v"])), "bits": packed(bits), "changed": [],
                          "unpacked": value(bits, scale(rank["v"]))})
        return found
    if what == "valley":
        return [{}] * len(case)
    ranks, objects = len(case), len(case[0]["grads"])
    sums = [[[] for _ in range(objects)] for _ in range(ranks)]
    left = [[0.0] * ranks for _ in range(objects)]
    for step in range(max(map(len, case[0]["grads"]))):
        for o in range(objects):
            if step >= len(case[0]["grads"][o]):
                continue
            mine, grads = left[0 if shared else o], [rank["grads"][o][step] for rank in case]
            asked = [ask(g, e) for g, e in zip(grads, mine, strict=True)]
            scales = [scale(scaled(a, g)) for a, g in zip(asked, grads, strict=True)]
            bits = [bit(a) for a in asked]
            sents = [value(b, s) for b, s in zip(bits, scales, strict=True)]
            totals = [total(sents, scales, bits, r) for r in range(ranks)]
            for r in range(ranks):
                sums[r][o].append(totals[r])
                mine[r] = keep(asked[r], grads[r], sents[r], mine[r], totals[r], ranks)
    if late:
        sums = [[[of[-1]] * len(of) for of in rank] for rank in sums]
    return [{"sums": rank, "changed": []} for rank in sums]


def truth(case):
    return run(case)


# ---------------------------------------------------------------- mistakes

def nothing(wanted, grad, sent, left, total, size):
    return 0.0


def s(text, **how):
    return gives(text, lambda case: run(case, **how))


def root(v):
    return math.sqrt(math.fsum(x * x for x in v) / len(v))


def of_those(chosen, otherwise=0.0):
    def scale(v):
        some = np.abs(v[chosen(v)])
        return some.mean() if len(some) else otherwise
    return scale


def majority(sents, scales, bits, rank):
    """The sign of most ranks, with the mean scale."""
    votes = sum(np.where(b, 1, -1) for b in bits)
    return np.where(votes >= 0, 1, -1) * sum(scales) / len(scales)


def little(bits):
    """The bits of each byte in the other order."""
    rows = np.pad(bits, (0, -len(bits) % 8)).reshape(-1, 8)[:, ::-1]
    return rows.reshape(-1)[:len(bits)]


def rounded(v):
    return float(np.float32(mean(v)))


def changed(what):
    """For when. What pack changes is wrong wherever it is used."""
    return lambda case, got: any(what in one for rank in got for one in rank["changed"])


def arrays(rank):
    """All numbers of an output, array by array."""
    if "sums" in rank:
        return [np.asarray(x) for of in rank["sums"] for x in of]
    return [np.asarray(rank[name]) for name in ("scale", "bits", "unpacked")]


def near(case, got):
    return all(same(x, y, 1e-4) for rank, right in zip(got, truth(case), strict=True)
               for x, y in zip(arrays(rank), arrays(right), strict=True))


SIGNATURES = [
    when("v isn't what it was before pack: work on a copy", changed("v")),
    when("grad isn't what it was before the call: add what was left out into a new array", changed("call")),
    s("nothing is kept: what the signs leave out is lost, step after step. Keep it, and add it to the next gradient",
      keep=nothing),
    s("what is kept is grad less what was sent: what had been left out before is forgotten, though not all of it was "
      "sent. Keep what was to be sent less what was", keep=lambda w, g, sent, left, t, n: g - sent),
    s("what is left out is counted twice: what was to be sent has all of the earlier rest in it already, so replace "
      "the rest, don't add to it", keep=lambda w, g, sent, left, t, n: left + w - sent),
    s("what was left out has the wrong sign: it is what was to be sent less what was sent, and is added to the next "
      "gradient", keep=lambda w, g, sent, left, t, n: sent - w),
    s("what is kept is less the sum of all ranks, where this rank has only sent its own part: each keeps what it has "
      "left out itself", keep=lambda w, g, sent, left, t, n: w - t),
    s("what is kept is less the mean of what all have sent; each keeps what it has left out itself",
      keep=lambda w, g, sent, left, t, n: w - t / n),
    s("all of what was to be sent is kept, as if nothing had been sent", keep=lambda w, g, sent, left, t, n: w),
    s("only half of what was left out is kept. All of it must be, or what was sent and what is left are less than the "
      "gradients", keep=lambda w, g, sent, left, t, n: (w - sent) / 2),
    s("where a rank's gradient is 0 what it has left out before isn't sent, and is lost: it is still to be sent",
      ask=lambda g, e: g + e if g.any() else g),
    s("what one OneBit leaves out is added to another one's gradient: keep it on the object, not on the class, nor in "
      "a global variable", shared=True),
    s("an array that was returned is overwritten by the next call: return a new one", late=True),
    s("the scale is that of the gradient alone; the signs are of gradient and rest together, and so must the scale be",
      scaled=lambda wanted, grad: grad),
    s("the signs are multiplied by the rank's own scale, also those of others: each rank's signs have a scale of their "
      "own, which comes with them", total=lambda sents, scales, bits, rank: sum(plus_or_minus(b, scales[rank])
                                                                                 for b in bits)),
    s("the signs are multiplied by rank 0's scale: each rank's signs have a scale of their own",
      total=lambda sents, scales, bits, rank: sum(plus_or_minus(b, scales[0]) for b in bits)),
    s("the signs are added up, and the scales' mean is put in front; each rank's signs have a scale of their own",
      total=lambda sents, scales, bits, rank: sum(plus_or_minus(b, sum(scales) / len(scales)) for b in bits)),
    s("the mean over the ranks; asked for is the sum", total=lambda sents, scales, bits, rank: sum(sents) / len(sents)),
    s("only what this rank has sent itself: nothing of the others is added", total=lambda sents, scales, bits, rank:
      sents[rank]),
    s("what this rank has sent itself is added twice: all_gather's out has it too", total=lambda sents, scales, bits,
      rank: sum(sents) + sents[rank]),
    s("what this rank has sent itself is missing: only the others' is added", total=lambda sents, scales, bits, rank:
      sum(sents) - sents[rank]),
    s("rank 0's part, on all ranks: add up all rows of out", total=lambda sents, scales, bits, rank: sents[0]),
    s("a vote: most ranks' sign, with the mean scale. Asked for is the sum of what the ranks have sent",
      total=majority),
    s("signs and bits are reversed: a bit of 1 stands for +scale", value=lambda bits, scale: plus_or_minus(~bits, scale)
      ),
    s("a bit of 0 stands for 0 here; it stands for -scale", value=lambda bits, scale: np.where(bits, scale, 0.0)),
    s("a bit of 1 stands for 0 here, and one of 0 for -scale", value=lambda bits, scale: np.where(bits, 0.0, -scale)),
    s("a bit of 1 stands for +1: where is the scale?", value=lambda bits, scale: np.where(bits, 1.0, -1.0)),
    s("within a byte the signs are unpacked in the reverse order: pack and unpack with one bitorder, packbits's own",
      value=lambda bits, scale: plus_or_minus(little(bits), scale)),
    s("the scale is 1: the step's size has nothing to do with the gradient's, and what is left out grows and grows",
      scale=lambda v: 1.0),
    s("the scale is the greatest number. Then all numbers are sent as large as the largest; the derivative of "
      "Σ (v - s·sign)² by s is 0 where s is the mean of |v|", scale=lambda v: np.abs(v).max()),
    s("the scale is the root of the mean square: then (scale, bits) has the length of v, but isn't the nearest to it",
      scale=root),
    s("the scale is the median of |v|, nearest by the sum of distances; asked for is the sum of squares",
      scale=lambda v: np.median(np.abs(v))),
    s("the scale is the sum of |v|: it must be their mean", scale=lambda v: np.abs(v).sum()),
    s("the scale is ‖v‖, the root of the sum of squares: asked for is the number s for which ±s is nearest to v",
      scale=lambda v: math.sqrt(math.fsum(x * x for x in v))),
    s("the scale is the mean of v, not of |v|", scale=lambda v: v.mean()),
    s("the scale is |the mean of v|, not the mean of |v|", scale=lambda v: abs(v.mean())),
    s("the scale is a mean over those numbers alone that aren't 0: zeros are sent as ±s, too, and count",
      scale=of_those(lambda v: v != 0)),
    s("the scale is a mean over the positive numbers alone", scale=of_those(lambda v: v > 0)),
    s("the scale is half as large: |v| has the mean itself as the nearest", scale=lambda v: mean(v) / 2),
    s("a 0 has the bit 0, so that it is sent as -scale: 1 where v ≥ 0", bit=lambda v: v > 0),
    s("-0.0 has the bit 0, so that it is sent as -scale: it is ≥ 0 as well, though np.signbit says that it has a sign",
      bit=lambda v: ~np.signbit(v)),
    s("signs and bits are reversed: 1 is to be +scale, where v ≥ 0", bit=lambda v: v < 0),
    s("the scale has a float32's digits alone: 8 bytes are for a float64", scale=rounded),
    when("nearly right: does the scale travel in 32 bits, or is a small number added to it?", near),
]


def bytes_allowed(case, got):
    """For each rank what its sums may send."""
    if case[0]["what"] != "sum":
        return np.inf
    return sum(len(grads) * (-(-len(grads[0]) // 8) + 8 + SLACK) for grads in case[0]["grads"]) * (len(case) - 1)


def sent(got):
    return max(sum(rank.sent.values()) for rank in got)


def per_number(case, got):
    numbers = sum(len(grads) * len(grads[0]) for grads in case[0]["grads"])
    return 8 * sent(got) / numbers / (len(got) - 1)


DEMANDS = [
    demand(lambda case, got: f"the right sums, but {per_number(case, got):.1f} bits per number went to each other "
                             "rank: send the packed bits, and one scale",
           lambda case, got: sent(got) <= bytes_allowed(case, got)),
    demand("the right sums, but in more than two messages per call: scale and bits may go in one",
           lambda case, got: case[0]["what"] != "sum" or all(
               len(rank.calls) <= 2 * sum(map(len, case[0]["grads"])) for rank in got)),
    demand("right by itself, but the descent in the valley has given no numbers",
           lambda case, got: case[0]["what"] != "valley" or all(np.isfinite(got[0][name]).all()
                                                               for name in ("without", "with"))),
]
