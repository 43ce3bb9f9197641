"""22.5's known mistakes, by what they give, and what is demanded beside right numbers."""

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import same

from .unsummed import NAMES, added, factor, lengths, one_by_one, run, summed, truth, unit


def t(text, **how):
    return gives(text, lambda case: run(case, **how))


def b(text, **how):
    """Where what comes out hangs on the columns' signs, which are LAPACK's or Gram and Schmidt's."""
    return when(text, lambda case, got: stepping(case) and any(
        alike(run(case, directions=directions, **how), got, 1e-7) for directions in (factor, one_by_one)))


def alike(theirs, got, tolerance):
    return all(same(np.asarray(x), np.asarray(y), tolerance)
               for rank, right in zip(got, theirs, strict=True) for name in NAMES
               for of, others in zip(rank[name], right[name], strict=True) for x, y in zip(of, others, strict=True))


def stepping(case):
    return case[0]["what"] == "steps"


def idles(case):
    return not any(np.any(x) for rank in case for x in (*rank["momentum"], *rank["grads"][0]))


def numbers(case):
    """How many a rank may hand to all-reduces."""
    return sum(q.shape[1] * sum(p.shape) * len(grads)
               for p, q, grads in zip(case[0]["p"], case[0]["q"], case[0]["grads"], strict=True))


def handed(got):
    return max(sum(call["bytes"] for call in rank.calls) for rank in got) // 8


def calls(case):
    return 2 * sum(map(len, case[0]["grads"]))


def changed(name):
    return lambda case, got: stepping(case) and any(name in rank["wrong"] for rank in got)


def sends_whole(case, got):
    """Some all-reduce has as many numbers as the matrix."""
    if not stepping(case) or len(case) == 1:
        return False
    sizes = {bytes_of_one * p.size for p in case[0]["p"] for bytes_of_one in (4, 8)}
    return all(sizes & {call["bytes"] for call in rank.calls} for rank in got)


def stays(case, got, name):
    """Whether nobody's p, or none of the momenta, has changed in any step."""
    if not stepping(case):
        return False
    of_ranks = [rank[name] for rank in case]
    start = of_ranks[0] if name == "p" else summed(of_ranks)
    return all(same(np.asarray(found), first, 1e-9) for rank in got
               for of, first in zip(rank[name], start, strict=True) for found in of)


def whole_sent(case, got):
    (n, m), r = case[0]["p"][0].shape, case[0]["q"][0].shape[1]
    return (f"{n * m} numbers were handed to an all-reduce at once, as many as a matrix of {n} × {m} has. No such "
            "matrix is ever summed, neither gradients nor momenta nor steps: each rank keeps its own part, and B Q and "
            f"R, {n} × {r} and {m} × {r}, are all that travels")


def mean(parts):
    return [sum(parts) / len(parts)] * len(parts)


def twice(parts):
    return [len(parts) * sum(parts)] * len(parts)


def greatest(parts):
    return [np.max(parts, axis=0)] * len(parts)


def their_own(parts):
    return parts


def of_rank_0(parts):
    return [parts[0]] * len(parts)


def as_it_is(y):
    return y


def whole_length(y):
    return y / np.linalg.norm(y)


def by_singular_vectors(y):
    return np.linalg.svd(y, full_matrices=False)[0]


def nearest(y):
    """The orthonormal matrix that is nearest: that of Muon."""
    left, _, right = np.linalg.svd(y, full_matrices=False)
    return left @ right


def orthonormal(whole, eps):
    return factor(whole) if whole.any() else whole


def in_one_length(whole, eps):
    return whole / (np.linalg.norm(whole) + eps)


def rows_of_length_1(whole, eps):
    return whole / (np.sqrt((whole * whole).sum(1, keepdims=True)) + eps)


def of_each(combine):
    """news: Q of each rank's own R, and then what they give together."""
    return lambda owns, wholes, eps: combine([unit(own, eps) for own in owns])


def kept(formula):
    """keep: of b, u, own, whole, and what is called by name."""
    return lambda b, u, own, whole, now: formula(b, u, own, whole, **now)


def near(case, got):
    return alike(truth(case), got, 1e-4)


SIGNATURES = [
    when("grad isn't what it was before the call: B goes into momentum", changed("grad")),
    when("the q that was given isn't what it was before the call: return a new array, for the caller may need the old "
         "one still", changed("q")),
    when(whole_sent, sends_whole),
    t("p moves on rank 0 alone; the step is every rank's", step=lambda p, delta, rank, lr: p if rank else p - delta),
    when("wrong where there is no gradient at all: Q is zeros there, and p stays where it is. Who divides by the "
         "length of a column of zeros gets nan; np.linalg.qr doesn't", lambda case, got: idles(case)),
    when("neither p nor momentum has changed: momentum = … and p = … are new arrays, which nobody else has. Write into "
         "those that were given, by += and -=",
         lambda case, got: stays(case, got, "p") and stays(case, got, "momentum")),
    when("p hasn't moved: write into the array that was given, p -= …; p = p - … is a new one, which nobody else has",
         lambda case, got: stays(case, got, "p")),
    when("momentum isn't renewed: write into the array that was given, momentum += …; momentum = momentum + … is a new "
         "one, which nobody else has", lambda case, got: stays(case, got, "momentum")),
    t("momentum is B after the step: what the step takes must leave it, but for mu of it. If you have written "
      "momentum = momentum - …, that is a new array, which nobody else has",
      keep=kept(lambda b, u, own, whole, **_: b)),
    t("momentum loses all ranks' R on every rank, so that the parts add up to B - {ranks} (1 - mu) P Rᵀ: each takes "
      "off what its own B_w has, P R_wᵀ, by R_w before the sum",
      keep=kept(lambda b, u, own, whole, mu, **_: b - (1 - mu) * u @ whole.T)),
    t("momentum is B less (1 - mu) P Qᵀ; Q has columns of length 1, and what B has in these directions is P R_wᵀ",
      keep=kept(lambda b, u, own, whole, mu, q, **_: b - (1 - mu) * u @ q.T)),
    t("each rank takes off its momentum P times its own R with columns of length 1; R is made so for the step alone, "
      "and what B_w has in these directions is P R_wᵀ, as it is",
      keep=kept(lambda b, u, own, whole, mu, eps, **_: b - (1 - mu) * u @ unit(own, eps).T)),
    t("mu and 1 - mu are exchanged: mu of what a step takes is left in M, and 1 - mu goes",
      keep=kept(lambda b, u, own, whole, mu, **_: b - mu * u @ own.T)),
    t("momentum is B - P Rᵀ, so that nothing is left of what a step has taken: mu of it stays",
      keep=kept(lambda b, u, own, whole, **_: b - u @ own.T)),
    t("momentum is B + (1 - mu) P Rᵀ: what a step takes is to leave it",
      keep=kept(lambda b, u, own, whole, mu, **_: b + (1 - mu) * u @ own.T)),
    t("momentum is mu B, as other optimizers have it: only what the step takes decays. All else stays whole, or it "
      "would be lost before its turn comes", keep=kept(lambda b, u, own, whole, mu, **_: mu * b)),
    t("momentum is mu (B - P Rᵀ): what the step has not taken stays whole, and of what it has taken mu",
      keep=kept(lambda b, u, own, whole, mu, **_: mu * (b - u @ own.T))),
    t("momentum is mu P Rᵀ: of what the step takes mu is left, but what it hasn't taken is lost; it is still to come",
      keep=kept(lambda b, u, own, whole, mu, **_: mu * u @ own.T)),
    t("momentum is what it was less (1 - mu) P Rᵀ, and the gradient has not come into it: it is B that goes on",
      keep=kept(lambda b, u, own, whole, mu, m, **_: m - (1 - mu) * u @ own.T)),
    t("momentum is G - (1 - mu) P Rᵀ, and what it was before is lost",
      keep=kept(lambda b, u, own, whole, mu, g, **_: g - (1 - mu) * u @ own.T)),
    t("each rank takes 1/{ranks} of its own P R_wᵀ off its momentum: take all of it, for R_w is this rank's alone",
      keep=kept(lambda b, u, own, whole, mu, ranks, **_: b - (1 - mu) / ranks * u @ own.T)),
    t("B is mu M + G, and nothing is taken of it, as with Muon: B is M + G, and what shrinks is what the step takes",
      ask=lambda m, g, mu, lr: mu * m + g, keep=kept(lambda b, u, own, whole, **_: b)),
    t("B is mu M + G, as with Muon: M has lost already what the last step took. B is M + G",
      ask=lambda m, g, mu, lr: mu * m + g),
    t("B is mu M + (1 - mu) G, a running mean. It is M + G, for what a step doesn't take of G is to wait, not to "
      "shrink", ask=lambda m, g, mu, lr: mu * m + (1 - mu) * g),
    t("B is M + (1 - mu) G; it is M + G", ask=lambda m, g, mu, lr: m + (1 - mu) * g),
    t("B is M + lr G: the rate is that of the step, and has nothing to do with what is added up",
      ask=lambda m, g, mu, lr: m + lr * g),
    t("B is M - G: then p goes up the gradient, and what is left out has the wrong sign",
      ask=lambda m, g, mu, lr: m - g),
    t("B is the gradient alone: what the steps before have not taken is in M, and belongs to it",
      ask=lambda m, g, mu, lr: g),
    gives("the gradient is divided by the number of ranks: what the ranks have are parts of a sum, not of a mean",
          lambda case: run(case, ask=lambda m, g, mu, lr: m + g / len(case))),
    t("B Q is made of the gradient alone; B has what is left of earlier ones, too", searched=lambda b, g: g),
    b("B Q is made of the momentum as it was, without this step's gradient",
      searched=lambda b, g: b - g),
    t("R is made of the gradient alone; it is Bᵀ P, with what is left of earlier ones",
      product=lambda b, g, u, y: g.T @ u),
    t("P isn't made orthonormal: R, B and p get the length of B Q as well, squared", directions=as_it_is),
    t("P's columns have length 1, but aren't orthogonal to each other: what two of them have in common is taken twice",
      directions=lambda y: unit(y)),
    t("P is divided by its length as a whole: each column must have length 1, and be orthogonal to the others",
      directions=whole_length),
    t("P is orthonormal, but another basis than asked for, by singular vectors: R's columns are made of length 1 one "
      "by one, so that it matters which directions they are. Column 0 of P is to be that of B Q, and so on",
      directions=by_singular_vectors),
    t("P is orthonormal, but another basis than asked for, the nearest to B Q: R's columns are made of length 1 one by "
      "one, so that it matters which directions they are. Column 0 of P is to be that of B Q, and so on",
      directions=nearest),
    t("P is made from the last column to the first: column 0 of P is to be that of B Q, column 1 what is left of the "
      "next one, and so on", directions=lambda y: one_by_one(y[:, ::-1])[:, ::-1]),
    b("P is made orthonormal before it is summed: a sum of orthonormal columns has none any more. First the sum",
      own_directions=True),
    b("P is made orthonormal before the ranks' are averaged: a mean of orthonormal columns has none any more. First "
      "the sum", own_directions=True, of_p=mean),
    b("P is made orthonormal before it is summed, and again after that: but the sum that counts is that of B_w Q, "
      "whose parts have different lengths",
      own_directions=True, of_p=lambda parts: [factor(whole) for whole in added(parts)]),
    b("B Q isn't summed: each rank has a P of its own then, and R of different ones is added up", of_p=their_own),
    b("B Q is rank 0's, on all ranks: sum it", of_p=of_rank_0),
    b("neither B Q nor R is summed: each rank makes the step of its own momentum", of_p=their_own, of_r=their_own),
    b("R isn't summed: each rank moves p its own way, by its own Q, and the ranks part", of_r=their_own),
    b("R is rank 0's, on all ranks: sum it", of_r=of_rank_0),
    t("R has been averaged: its columns are 1/{ranks} as long then, and eps, which is added to their length, "
      "weighs more. It is a sum", of_r=mean),
    t("R has been summed twice: its columns are {ranks} times as long then, and eps, which is added to their length, "
      "weighs less", of_r=twice),
    t("each rank makes the columns of its own R of length 1, and these are summed: a rank with a small R counts as "
      "much as one with a large one, and the sum has no columns of length 1. First the sum", qs_of=of_each(added)),
    t("each rank makes the columns of its own R of length 1, and these are averaged: a rank with a small R counts as "
      "much as one with a large one. First the sum", qs_of=of_each(mean)),
    t("each rank makes the columns of its own R of length 1, and once more those of their sum: a rank with a small R "
      "counts as much as one with a large one. First the sum",
      qs_of=lambda owns, wholes, eps: [unit(q, eps) for q in of_each(added)(owns, wholes, eps)]),
    b("what all ranks have together isn't the sum: the greatest of their numbers is no product with any B",
      of_p=greatest, of_r=greatest),
    b("R is made of the columns of B Q, not of P: Bᵀ times what is orthonormal",
      product=lambda b, g, u, y: b.T @ y),
    t("the rows of Q have length 1; its columns are to have it", normal=rows_of_length_1),
    t("Q as a whole has length 1; each of its columns is to have it, so that p goes equally far in each direction",
      normal=in_one_length),
    b("Q's columns have been made orthonormal (there is an Orth-Dion that does it); asked for are the columns of R, "
      "each divided by its length", normal=orthonormal),
    b("Q is made orthonormal by np.linalg.qr, also where R is zeros: its columns have length 1 then, and p moves "
      "though there is no gradient. Divide each column of R by its length and eps",
      normal=lambda whole, eps: factor(whole)),
    t("p moves by P Qᵀ, but returned is R: its columns are to have length 1 there, too",
      go_on=lambda whole, new, q, own, eps: whole),
    t("p moves by P Rᵀ; by P Qᵀ it goes equally far in each direction, however large gradients are",
      moved=lambda whole, new, q, own, eps: whole),
    t("p moves by P Rᵀ, and R is returned: make R's columns of length 1 before both, or steps are as long as gradients",
      normal=lambda whole, eps: whole),
    b("p moves by P times the q that the step began with: Q is that of R, after P",
      moved=lambda whole, new, q, own, eps: q),
    t("p moves by the new Q, but returned is the q that the step began with: so the search never goes on",
      go_on=lambda whole, new, q, own, eps: q),
    b("p moves by the old q, which is returned as well: Q is that of R, after P",
      moved=lambda whole, new, q, own, eps: q, go_on=lambda whole, new, q, own, eps: q),
    t("p moves by this rank's own R, its columns of length 1: by the sum all ranks move alike",
      moved=lambda whole, new, q, own, eps: unit(own, eps)),
    t("returned is this rank's own R, its columns of length 1: it is the sum that is the same on all ranks",
      go_on=lambda whole, new, q, own, eps: unit(own, eps)),
    t("the sign: p + lr P Qᵀ goes up the gradient", step=lambda p, delta, rank, lr: p + delta),
    gives("p moves {ranks} times as far as it should: P and Q are those of the sum already",
          lambda case: run(case, step=lambda p, delta, rank, lr: p - len(case) * delta)),
    gives("p moves by 1/{ranks} of a step: P and Q are those of the sum, on every rank",
          lambda case: run(case, step=lambda p, delta, rank, lr: p - delta / len(case))),
    t("lr is left out: p moves by P Qᵀ", step=lambda p, delta, rank, lr: p - delta / lr),
    t("p moves by lr² P Qᵀ", step=lambda p, delta, rank, lr: p - lr * delta),
    t("lr is multiplied by √(n/m) where n > m, as the paper has it: here the caller has done it already",
      step=lambda p, delta, rank, lr: p - delta * max(1.0, p.shape[0] / p.shape[1]) ** 0.5),
    t("lr is multiplied by √(n/m), as the paper has it: here the caller has done it already",
      step=lambda p, delta, rank, lr: p - delta * (p.shape[0] / p.shape[1]) ** 0.5),
    t("p shrinks by a hundredth of lr, besides: nobody has asked for weight decay",
      step=lambda p, delta, rank, lr: p * (1 - 0.01 * lr) - delta),
    t("eps is always 1e-8, whatever it was given as", normal=lambda whole, eps: unit(whole, 1e-8)),
    t("R is zeros where there is no gradient, and is left so; but eps is to be added to the length of all columns",
      normal=lambda whole, eps: np.divide(whole, lengths(whole), out=np.zeros_like(whole), where=lengths(whole) > 0)),
    t("eps is the least length here; it is to be added to the length",
      normal=lambda whole, eps: whole / np.maximum(lengths(whole), eps)),
    t("eps is added to the square of the length; it is to be added to the length",
      normal=lambda whole, eps: whole / np.sqrt(lengths(whole) ** 2 + eps)),
    t("eps² is added to the square of the length; eps is to be added to the length",
      normal=lambda whole, eps: whole / np.sqrt(lengths(whole) ** 2 + eps * eps)),
    b("eps is added to R's numbers; it is to be added to the length of a column",
      normal=lambda whole, eps: (whole + eps) / lengths(whole + eps)),
    t("R's columns are divided by their squared length: the root is missing",
      normal=lambda whole, eps: whole / (lengths(whole) ** 2 + eps)),
    t("the length of a column is the root of its sum of squares; yours is the sum of absolute values",
      normal=lambda whole, eps: whole / (np.abs(whole).sum(0) + eps)),
    t("the length of a column is the root of its sum of squares; yours is its greatest number",
      normal=lambda whole, eps: whole / (np.abs(whole).max(0) + eps)),
    t("the length of a column is the root of its sum of squares; yours is that of their mean",
      normal=lambda whole, eps: whole / (lengths(whole) / len(whole) ** 0.5 + eps)),
    t("eps is left out: where there is no gradient at all R is zeros, and 0/0 is nan",
      normal=lambda whole, eps: unit(whole)),
    t("all steps search from the Q of the first call: take the q that is given, and keep none",
      one_q=True),
    t("the Q that was returned is overwritten by the next call: return a new array", late=True),
    when("nearly right: is something computed in float32, or a small number added before a division?",
         lambda case, got: stepping(case) and near(case, got)),
]


DEMANDS = [
    demand(lambda case, got: f"the right steps, but {whole_sent(case, got)}",
           lambda case, got: not sends_whole(case, got)),
    demand(lambda case, got: f"the right steps, but {handed(got):,} numbers were handed to all-reduces where "
                             f"{numbers(case):,} are enough: r (n + m) per step",
           lambda case, got: not stepping(case) or handed(got) <= numbers(case)),
    demand("the right steps, but in more than two all-reduces each",
           lambda case, got: not stepping(case) or all(len(rank.calls) <= calls(case) for rank in got)),
]
