"""22.5: its cases, and another way to the same. Its mistakes stand in missteps.py."""

import numpy as np

NAMES = "p", "q", "momentum"
SMALL = 0.02


# ---------------------------------------------------------------- cases

def matrix(rng, ranks, n, m, r, steps, lr=0.3, mu=0.8, eps=1e-8):
    """What a rank has of one matrix, for each rank. The gradients have a direction in common, and much of their own;
    they are so small that eps shows."""
    common = np.outer(rng.standard_normal(n), rng.standard_normal(m))
    p, q = rng.standard_normal((n, m)), unit(rng.standard_normal((m, r)))
    return [{"p": p, "q": q, "momentum": SMALL * rng.standard_normal((n, m)), "lr": lr, "mu": mu, "eps": eps,
             "grads": [SMALL * (common + (0.5 + rank) * rng.standard_normal((n, m))) for _ in range(steps)]}
            for rank in range(ranks)]


def alone(rng, ranks, *sizes, **settings):
    """A run that begins: only the last rank has a gradient in the first step, and only rank 0 has none in the last."""
    found = matrix(rng, ranks, *sizes, **settings)
    for mine in found:
        mine["momentum"] = np.zeros_like(mine["p"])
    for mine in found[:-1]:
        mine["grads"][0] = np.zeros_like(mine["p"])
    found[0]["grads"][-1] = np.zeros_like(found[0]["p"])
    return found


def idle(rng, ranks, *sizes):
    """Nobody has a gradient, nor has had one."""
    return [mine | {"momentum": 0 * mine["p"], "grads": [0 * mine["p"]]} for mine in matrix(rng, ranks, *sizes, 1)]


def cases(rng, ranks):
    drawn = [[matrix(rng, ranks, 8, 6, 2, 4)],
             [matrix(rng, ranks, 5, 9, 1, 3, mu=0.3), matrix(rng, ranks, 5, 9, 1, 4, lr=0.05, mu=0.9, eps=2.0)],
             [alone(rng, ranks, 9, 7, 2, 3, mu=0.7, eps=0.2)], [idle(rng, ranks, 5, 6, 2)],
             [matrix(rng, ranks, 40, 30, 3, 2, lr=0.7, mu=0.95)]]
    return [[{"what": "steps"} | {name: [of[rank][name] for of in matrices] for name in matrices[0][rank]}
             for rank in range(ranks)] for matrices in drawn]


# ---------------------------------------------------------------- rightly, and with mistakes

def unit(r, eps=0.0):
    return r / (lengths(r) + eps)


def lengths(r):
    return np.sqrt((r * r).sum(0))


def one_by_one(y):
    """Gram and Schmidt's basis, twice; 0 where nothing is left."""
    found = np.zeros_like(y)
    for j in range(y.shape[1]):
        column = y[:, j]
        for _ in range(2):
            column = column - found[:, :j] @ (found[:, :j].T @ column)
        length = np.sqrt(column @ column)
        found[:, j] = column / length if length > 1e-9 * np.sqrt(y[:, j] @ y[:, j]) else 0.0
    return found


def factor(y):
    """LAPACK's basis: Gram and Schmidt's but for signs, which matter to those who add up bases."""
    return np.linalg.qr(y)[0]


def turned(q):
    """As drive.py has it: of a column and its negative one."""
    largest = np.take_along_axis(q, np.abs(q).argmax(axis=0)[None], axis=0)
    return q * np.where(largest < 0, -1.0, 1.0)


def added(parts):
    """On every rank the sum."""
    return [sum(parts)] * len(parts)


def with_grad(m, g, mu, lr):
    return m + g


def rest(b, u, own, whole, case):
    """M_w. case: of this step, with what else a mistake takes."""
    return b - (1 - case["mu"]) * u @ own.T


def run(case, ask=with_grad, of_p=added, of_r=added, directions=one_by_one, own_directions=False, keep=rest,
        normal=unit, qs_of=None, moved=None, go_on=None, step=lambda p, delta, rank, lr: p - delta,
        product=lambda b, g, u, y: b.T @ u, searched=lambda b, g: b, late=False, one_q=False):
    """The outputs of all ranks, each with its part of the momentum; the keywords are the mistakes."""
    if case[0]["what"] == "training":
        return [{}] * len(case)
    found = [{name: [[] for _ in case[0]["p"]] for name in NAMES} for _ in case]
    with np.errstate(all="ignore"):
        for k, grads in enumerate(case[0]["grads"]):
            ps, ms, qs = ([rank[name][k] for rank in case] for name in ("p", "momentum", "q"))
            lr, mu, eps = (case[0][name][k] for name in ("lr", "mu", "eps"))
            first = [rank["q"][0] for rank in case] if one_q else qs
            for at in range(len(grads)):
                used = first if one_q else qs
                gs = [rank["grads"][k][at] for rank in case]
                bs = [ask(m, g, mu, lr) for m, g in zip(ms, gs, strict=True)]
                ys = [searched(b, g) @ q for b, g, q in zip(bs, gs, used, strict=True)]
                whole_ys = of_p(ys)
                us = of_p([directions(y) for y in ys]) if own_directions else [directions(y) for y in whole_ys]
                owns = [product(b, g, u, y) for b, g, u, y in zip(bs, gs, us, whole_ys, strict=True)]
                wholes = of_r(owns)
                news = qs_of(owns, wholes, eps) if qs_of else [normal(whole, eps) for whole in wholes]
                now = {"mu": mu, "eps": eps, "ranks": len(case)}
                ms = [keep(b, u, own, whole, now | {"m": m, "g": g, "q": new, "y": y})
                      for b, u, own, whole, m, g, new, y in zip(bs, us, owns, wholes, ms, gs, news, ys, strict=True)]
                ps = [step(p, lr * u @ (moved(whole, new, q, own, eps) if moved else new).T, rank, lr)
                      for rank, (p, u, whole, new, q, own) in enumerate(zip(ps, us, wholes, news, used, owns,
                                                                            strict=True))]
                qs = [go_on(whole, new, q, own, eps) if go_on else new
                      for whole, new, q, own in zip(wholes, news, used, owns, strict=True)]
                for rank, (p, q) in enumerate(zip(ps, qs, strict=True)):
                    for name, value in zip(NAMES, (p, turned(q), sum(ms)), strict=True):
                        found[rank][name][k].append(value)
    if late:
        found = [rank | {"q": [[rank["q"][-1][-1]] * len(of) for of in rank["q"]]} for rank in found]
    return [rank | {"wrong": []} for rank in found]


def truth(case):
    """What one process does that has all of the gradient and of the momentum."""
    if case[0]["what"] == "training":
        return [{}] * len(case)
    one = case[0] | {"momentum": summed([rank["momentum"] for rank in case]),
                     "grads": [summed(steps) for steps in zip(*(rank["grads"] for rank in case), strict=True)]}
    return run([one]) * len(case)


def summed(lists):
    return [sum(parts) for parts in zip(*lists, strict=True)]
