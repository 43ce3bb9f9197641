"""22.2 by projections, and what known mistakes would give."""

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import same

SHAPES = [(5, 2, 3), (7,), (4, 4), (6, 3), (1, 9), (30, 20), (), (20, 30), (3, 4, 5, 2), (2, 2), (40, 1)]


# ---------------------------------------------------------------- cases

def draw(rng, ranks, n, m, r, steps):
    """[(n, m) gradients of each step] for each rank: a direction that all have, and noise."""
    common = np.outer(rng.standard_normal(n), rng.standard_normal(m))
    grads = [[common + (0.5 + rank) * rng.standard_normal((n, m)) for _ in range(steps)] for rank in range(ranks)]
    return rng.standard_normal((m, r)), grads


def low(rng, ranks, n, m, r, k, steps):
    """Those of a lower rank than r: k."""
    left, right = rng.standard_normal((n, k)), rng.standard_normal((k, m))
    return rng.standard_normal((m, r)), [[left @ rng.standard_normal((k, k)) @ right for _ in range(steps)]
                                         for _ in range(ranks)]


def alone(rng, ranks, n, m, r, steps):
    """Only the last rank has a gradient in the first step, and only rank 0 has none in the last."""
    q, grads = draw(rng, ranks, n, m, r, steps)
    for of_rank in grads[:-1]:
        of_rank[0] = np.zeros((n, m))
    grads[0][-1] = np.zeros((n, m))
    return q, grads


def cases(rng, ranks):
    drawn = [[draw(rng, ranks, 6, 5, 2, 4)], [draw(rng, ranks, 4, 7, 1, 3), draw(rng, ranks, 4, 7, 1, 4)],
             [low(rng, ranks, 7, 6, 3, 1, 3)], [alone(rng, ranks, 5, 6, 2, 3)],
             [(rng.standard_normal((5, 2)), [[np.zeros((4, 5))] * 2] * ranks)], [draw(rng, ranks, 40, 30, 2, 2)]]
    return [*([{"what": "numbers", "shapes": [list(shape) for shape in SHAPES], "rank": rank}] * ranks
              for rank in (1, 2, 3)),
            *([{"what": "sum", "q": [q for q, _ in objects], "grads": [grads[rank] for _, grads in objects]}
               for rank in range(ranks)] for objects in drawn)]


# ---------------------------------------------------------------- rightly, and with mistakes

def fewest(shape, rank):
    if len(shape) < 2:
        return size(shape)
    n, m = flat(shape)
    return min(size(shape), rank * n + rank * m)


def size(shape):
    return int(np.prod(shape, dtype=int))


def flat(shape):
    return shape[0], size(shape[1:])


def basis(p):
    """Orthonormal columns for those of p, by its singular vectors; fewer where it has a lower rank."""
    u, s, _ = np.linalg.svd(p, full_matrices=False)
    return u[:, s > 1e-9 * s.max(initial=0.0)]


def factor(p):
    """LAPACK's basis: of one column more or less arbitrary where p's depend on each other."""
    return np.linalg.qr(p)[0]


def one_by_one(p):
    """Gram and Schmidt's basis: that of `factor` but for signs."""
    q, r = np.linalg.qr(p)
    return q * np.where(np.diag(r) < 0, -1, 1)


def unsent(m, grad, u, own, whole, left, size):
    return m - u @ own.T


def with_rest(grad, left):
    return grad + left


def next_q(q0, q, whole, own, u):
    return whole


def added(parts):
    """On every rank the sum."""
    return [sum(parts)] * len(parts)


def product(u, whole, own, q, p):
    return u @ whole.T


def run(case, count=fewest, of_p=added, of_q=added, directions=basis, keep=unsent, go_on=next_q,
        out=product, shared=False, late=False, own_directions=False, unfed=False, one_q=False,
        ask=with_rest):
    """Outputs of all ranks; the keywords are the mistakes."""
    what, ranks = case[0]["what"], len(case)
    if what == "numbers":
        return [{"numbers": [count(tuple(shape), case[0]["rank"]) for shape in case[0]["shapes"]]}] * ranks
    if what == "training":
        return [{}] * ranks
    found = [[[] for _ in case[0]["grads"]] for _ in case]
    q = [[mine] * ranks for mine in (case[0]["q"][::-1] if one_q else case[0]["q"])]
    left = [[0.0] * ranks for _ in case[0]["grads"]]
    with np.errstate(all="ignore"):
        for step in range(max(map(len, case[0]["grads"]))):
            for o, _ in enumerate(case[0]["grads"]):
                if step >= len(case[0]["grads"][o]):
                    continue
                at = 0 if shared else o
                grads = [rank["grads"][o][step] for rank in case]
                ms = [ask(g, e) for g, e in zip(grads, left[at], strict=True)]
                number = 0 if one_q else o
                ps = [m @ mine for m, mine in zip(ms, q[number], strict=True)]
                us = of_p([directions(p) for p in ps]) if own_directions else [directions(p) for p in of_p(ps)]
                owns = [(g if unfed else m).T @ u for g, m, u in zip(grads, ms, us, strict=True)]
                wholes = of_q(owns)
                outs = [out(u, whole, own, mine, p) for u, whole, own, mine, p in zip(us, wholes, owns, q[number],
                                                                                     ps, strict=True)]
                left[at] = [keep(m, g, u, own, whole, e, ranks) for m, g, u, own, whole, e in zip(
                    ms, grads, us, owns, wholes, left[at], strict=True)]
                q[number] = [go_on(case[0]["q"][o], mine, whole, own, u) for mine, whole, own, u in zip(
                    q[number], wholes, owns, us, strict=True)]
                for r in range(ranks):
                    found[r][o].append(outs[r])
    if late:
        found = [[[of[-1]] * len(of) for of in rank] for rank in found]
    return [{"sums": rank, "changed": []} for rank in found]


def truth(case):
    return run(case)


# ---------------------------------------------------------------- mistakes

def t(text, **how):
    return gives(text, lambda case: run(case, **how))


def b(text, **how):
    """Where what comes out hangs on the basis, which is LAPACK's or Gram and Schmidt's: asked where both have one."""
    def looks_like_it(case, got):
        if case[0]["what"] != "sum" or doubtful(case):
            return case[0]["what"] == "sum"
        return any(alike(case, run(case, directions=directions, **how), got, 1e-7) for directions in (
            factor, one_by_one))
    return when(text, looks_like_it)


def c(text, count):
    """Of `numbers`."""
    return gives("numbers: " + text, lambda case: run(case, count=count) if case[0]["what"] == "numbers" else None)


def summing(test):
    return lambda case, got: case[0]["what"] == "sum" and test(case, got)


def changed(name):
    return summing(lambda case, got: any(name in what for rank in got for what in rank["changed"]))


def mean(parts):
    return [sum(parts) / len(parts)] * len(parts)


def their_own(parts):
    return parts


def of_rank_0(parts):
    return [parts[0]] * len(parts)


def as_it_is(p):
    return p


def normalised(p):
    """Each column by itself."""
    return p / np.linalg.norm(p, axis=0)


def whole_length(p):
    return p / np.linalg.norm(p)


def doubtful(case):
    """Whether P's columns depend on each other: gradients of a lower rank, or of zeros."""
    grads = [g for rank in case for of in rank["grads"] for g in of]
    return case[0]["what"] == "sum" and max(map(np.linalg.matrix_rank, grads)) < case[0]["q"][0].shape[1]


def never_smaller(shape, rank):
    return rank * sum(flat(shape)) if len(shape) > 1 else size(shape)


def by_the_last(shape, rank):
    return min(size(shape), rank * (size(shape[:-1]) + shape[-1])) if len(shape) > 1 else size(shape)


def first_two(shape, rank):
    return min(size(shape), rank * (shape[0] + shape[1])) if len(shape) > 1 else size(shape)


def all_axes(shape, rank):
    return min(size(shape), rank * sum(shape)) if len(shape) > 1 else size(shape)


def matrices_only(shape, rank):
    return fewest(shape, rank) if len(shape) == 2 else size(shape)


def only_p(shape, rank):
    return min(size(shape), rank * shape[0]) if len(shape) > 1 else size(shape)


def no_rank(shape, rank):
    return fewest(shape, 1)


def one_less(shape, rank):
    return min(size(shape), rank * (sum(flat(shape)) - rank)) if len(shape) > 1 else size(shape)


def product_of_axes(shape, rank):
    return rank * size(shape) if len(shape) > 1 else size(shape)


def in_bytes(shape, rank):
    return 8 * fewest(shape, rank)


def near(case, got):
    return doubtful(case) or alike(case, truth(case), got, 1e-4)


def alike(case, theirs, got, tolerance):
    return all(same(np.asarray(x), np.asarray(y), tolerance) for rank, right in zip(got, theirs, strict=True)
               for of, others in zip(rank["sums"], right["sums"], strict=True)
               for x, y in zip(of, others, strict=True))


SIGNATURES = [
    when("grad isn't what it was before the call: add what was left out into a new array", changed("call")),
    when("the q that PowerSGD is made with isn't what it was: all_reduce writes into the array that it gets. The "
         "caller's may be another's, too", changed("q")),
    c("what isn't smaller in two parts is sent as it is: (4, 4) with r = 3 has 16 numbers, not 24", never_smaller),
    c("more than two axes are a matrix of the first by all others: (5, 2, 3) is 5 × 6; yours takes the last by all "
      "others", by_the_last),
    c("more than two axes are a matrix of the first by all others: (5, 2, 3) is 5 × 6, not 5 × 2", first_two),
    c("more than two axes are a matrix of the first by all others: (5, 2, 3) is 5 × 6, and Q has 6 rows, not 2 + 3",
      all_axes),
    c("more than two axes are sent as a matrix, too: of the first by all others", matrices_only),
    c("only P is counted; Q is sent as well", only_p),
    c("r times nothing: P has r columns, and so has Q", no_rank),
    c("that is how many numbers a matrix of rank r has; sent are all of P and of Q, r (n + m)", one_less),
    c("P and Q have r columns each, n and m long: a sum, not a product", product_of_axes),
    c("these are bytes; asked for are numbers", in_bytes),
    when("wrong where P's columns depend on each other: where the gradients have a lower rank than r, or are zeros. "
         "Who takes from each column what the others have is left with 0, or with rounding errors, and divides by "
         "their length. Do it twice, and leave 0 as it is, or let np.linalg.qr do it",
         lambda case, got: doubtful(case)),
    t("nothing is kept: what lies in other directions than P's is lost, step after step", keep=lambda *_: 0.0),
    t("what is left out is less all ranks' Qᵀ: M_w less P times its own Qᵀ, before the sum. So each rank counts what "
      "the others have sent", keep=lambda m, g, u, own, whole, e, n: m - u @ whole.T),
    t("what is kept is grad less what was sent: what had been left out before is forgotten, though only a part of it "
      "was sent", keep=lambda m, g, u, own, whole, e, n: g - u @ own.T),
    t("what is left out is counted twice: M_w has all of the earlier rest in it already, so replace the rest, don't "
      "add to it", keep=lambda m, g, u, own, whole, e, n: e + m - u @ own.T),
    t("what was left out has the wrong sign: it is M_w less what P takes of it, and is added to the next gradient",
      keep=lambda m, g, u, own, whole, e, n: u @ own.T - m),
    t("all of M_w is kept, as if nothing had been sent", keep=lambda m, g, u, own, whole, e, n: m),
    t("what is kept is what was sent; keep the rest", keep=lambda m, g, u, own, whole, e, n: u @ own.T),
    t("every step begins with the first Q again: begin with the Q that the last one has found, and the directions get "
      "better from step to step", go_on=lambda q0, q, whole, own, u: q0),
    t("the next step begins with this rank's own Q; begin with the sum, which is the same everywhere",
      go_on=lambda q0, q, whole, own, u: own),
    b("the matrices are added to: Q must be replaced by the sum of this step's",
      go_on=lambda q0, q, whole, own, u: q + whole if whole.shape == q.shape else whole),
    t("P isn't made orthonormal: P Qᵀ is P Pᵀ M then, and of the wrong size", directions=as_it_is),
    t("P's columns have length 1, but aren't orthogonal to each other: what two of them have in common is sent twice",
      directions=normalised),
    t("P is divided by its length as a whole; its columns must be orthonormal: length 1 each, and orthogonal",
      directions=whole_length),
    b("P is made orthonormal before it is summed: a sum of orthonormal columns has none any more",
      own_directions=True),
    b("P is made orthonormal before the ranks' are averaged: a mean of orthonormal columns has none any more. First "
      "the sum, then the factors", own_directions=True, of_p=mean),
    b("P isn't summed: each rank has directions of its own then, and Q of different ones is added up",
      of_p=their_own),
    t("Q isn't summed: the result is the part of this rank alone", of_q=their_own),
    b("P is rank 0's, on all ranks: sum it", of_p=of_rank_0),
    b("neither P nor Q is summed: nothing has been exchanged", of_p=their_own, of_q=their_own),
    t("the mean over the ranks; asked for is the sum", of_q=mean),
    b("Q has been made orthonormal, too, before the product: then it has no lengths any more. P alone is",
      out=lambda u, whole, own, q, p: u @ np.linalg.qr(whole)[0].T if whole.any() else u @ whole.T),
    b("the product has the Q that this step began with: Qᵀ = Pᵀ M comes after P",
      out=lambda u, whole, own, q, p: u @ q.T),
    t("the product has this rank's own Q instead of the sum", out=lambda u, whole, own, q, p: u @ own.T),
    t("what was left out comes into P, but not into Q, which is made of grad: both are of M_w", unfed=True),
    t("where a rank's gradient is 0 what it has left out before isn't sent, and is lost: it is still to be sent",
      ask=lambda g, e: g + e if g.any() else g),
    t("what one PowerSGD keeps is used by another one: keep Q on the object, not on the class", one_q=True),
    t("what one PowerSGD keeps is used by another one: keep it on the object, not on the class", shared=True),
    t("an array that was returned is overwritten by the next call: return a new one", late=True),
    when("nearly right: is something kept in float32, or a small number added before a division?", summing(near)),
]


def numbers_allowed(case):
    return sum(len(of) * q.shape[1] * (len(of[0]) + len(q)) for q, of in zip(
        case[0]["q"], case[0]["grads"], strict=True))


def calls(case):
    return 2 * sum(map(len, case[0]["grads"]))


def numbers_handed(got):
    return max(sum(call["bytes"] for call in rank.calls) for rank in got) // 8


DEMANDS = [
    demand(lambda case, got: f"the right sums, but {numbers_handed(got):,} numbers were handed to all-reduces where "
                             f"{numbers_allowed(case):,} are enough: r (n + m) per call",
           lambda case, got: case[0]["what"] != "sum" or numbers_handed(got) <= numbers_allowed(case)),
    demand("the right sums, but in more than two all-reduces per call",
           lambda case, got: case[0]["what"] != "sum" or all(len(rank.calls) <= calls(case) for rank in got)),
]
