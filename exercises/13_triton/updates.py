"""What 13.3 is to give, and what known mistakes in it give."""

import numpy as np

from exercises.frame.kernels import is_out


def owners(case):
    """Which parameter each element belongs to."""
    return np.repeat(np.arange(len(case["ends"])), np.diff([0, *case["ends"]]))


def corrected(mean, beta, t):
    """Of a mean that has begun at 0, without the bias."""
    return mean / (1 - beta ** t)


def uncorrected(mean, beta, t):
    return mean


def adamw(case, decay=None, step_of=lambda t: t, of_mean=corrected, of_squares=corrected, square=lambda g: g * g,
          fresh=lambda beta: 1 - beta, fresh_in_m=None, l2=False, late=False, eps_inside=False, eps_early=False,
          decay_after=False, after=lambda m, v: (m, v), **others):
    """p after each step in float64; the keywords are mistakes. after: what m and v are when the next step begins.
    others: settings in place of the case's."""
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8} | case["settings"] | others
    (beta1, beta2), eps, lr = settings["betas"], settings["eps"], settings["lr"]
    p, found = case["p"].astype(float), []
    m, v = np.zeros(p.size), np.zeros(p.size)
    decay = by_element(case, case["decays"]) if decay is None else decay(case)
    for t, g in enumerate(case["grads"].astype(float), 1):
        old = m, v = after(m, v)
        if l2:
            g = g + decay * p
        m, v = beta1 * m + (fresh_in_m or fresh)(beta1) * g, beta2 * v + fresh(beta2) * square(g)
        first, second = old if late else (m, v)
        mean, root = of_mean(first, beta1, step_of(t)), of_squares(second, beta2, step_of(t))
        scaled = eps / (1 - beta2 ** t) ** 0.5 if eps_early else eps
        with np.errstate(invalid="ignore"):      # of m that is taken for v
            step = lr * mean / (np.sqrt(root + eps) if eps_inside else np.sqrt(root) + scaled)
        p = (p - step) * (1 - lr * decay) if decay_after else p * (1 - (0 if l2 else lr) * decay) - step
        found.append(p)
    return np.stack(found)


def by_element(case, decays):
    return np.asarray(decays, float)[owners(case)]


def mistake(**how):
    return lambda case: {"p": adamw(case, **how)}


def with_settings(**changed):
    """changed: functions of the case's own settings."""
    return lambda case: {"p": adamw(case, **{name: f(case["settings"]) for name, f in changed.items()})}


def uphill(case):
    return {"p": adamw(case, lr=-case["settings"]["lr"], decay=lambda case: -by_element(case, case["decays"]))}


def decay_by_program(case, got):
    """Whether each program has taken the decay with its own number, and those behind the last one what lies there."""
    programs = np.concatenate([np.arange(n) // case["settings"]["block"] for n in np.diff([0, *case["ends"]])])
    number = np.cumsum(np.r_[0, (np.diff(programs) != 0) | (np.diff(owners(case)) != 0)])
    decays = np.r_[case["decays"], np.full(number[-1] + 1, np.nan)]
    return number[-1] > 0 and is_out("p", lambda case: adamw(case, decay=lambda case: decays[number]))(case, got)


def counted_with_others(case, got):
    """Whether t counts the steps of all optimizers that there are: in the first case another's come by turns with this
    one's, in the later ones those of the earlier cases have gone before."""
    steps = len(case["grads"])
    ways = [lambda t: 2 * t - 1, *(lambda t, before=before: t + before * steps for before in (2, 3, 4))]
    return any(is_out("p", lambda case, way=way: adamw(case, step_of=way))(case, got) for way in ways)


def decay_by_block(case):
    """Of blocks that go over the parameters' ends, each with the decay of the one in which it begins."""
    block = case["settings"]["block"]
    return by_element(case, case["decays"])[np.arange(case["p"].size) // block * block]


def rows_of(case):
    """The table."""
    return [(at, min(at + case["settings"]["block"], stop), k)
            for k, (start, stop) in enumerate(zip([0, *case["ends"][:-1]], case["ends"], strict=True))
            for at in range(start, stop, case["settings"]["block"])]


def left_behind(case, got):
    """The elements that no step has changed, where all others are right; a step changes all of them by something."""
    still = (got["p"] == case["p"]).all(axis=0)
    right = not still.all() and np.allclose(got["p"][:, ~still], adamw(case)[:, ~still], rtol=1e-4)
    return [int(at) for at in np.flatnonzero(still)] if right else []


def programs(case):
    """(rows of the table, blocks in all elements)."""
    return len(rows_of(case)), -(-case["p"].size // case["settings"]["block"])


def last_rows_left(case, got):
    """Whether programs are begun for as many rows of the table only as there are blocks in all elements."""
    left = [k for start, stop, _ in rows_of(case)[programs(case)[1]:] for k in range(start, stop)]
    return left != [] and left_behind(case, got) == left


def never_updated(case, got):
    """Which elements no step has changed, and why."""
    left = left_behind(case, got)
    here = f"p[{left[-1]}] is never updated, the {{}} element of {{}}: {{}}".format
    parameter = f"parameter {owners(case)[left[-1]]}"
    if set(left) <= {stop - 1 for stop in case["ends"]}:
        return here("last", parameter, "the rows of the table must reach to where each parameter ends")
    if set(left) <= set(case["ends"]):
        return here("first", parameter, "a parameter begins where the one before it ends, at ends[k - 1], and not one "
                                        "further")
    if set(left) <= {stop - 1 for _, stop, _ in rows_of(case)}:
        return here("last", "a program", "stop is the first place behind its own, where the next one begins")
    return f"p[{left[-1]}] of {parameter} is never updated: the rows of the table must reach from where each " \
           "parameter begins to where it ends"
