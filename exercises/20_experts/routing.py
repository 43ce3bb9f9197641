"""20.1 one token at a time, with a place for each mistake."""

import math

import numpy as np


def softmax(x, axis=-1):
    with np.errstate(all="ignore"):
        exps = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
        return exps / exps.sum(axis, keepdims=True)


def draw(rng, tokens, experts, k, level=0.0, slope=0.0, ties=False):
    """Logits and what goes with them. slope: by how much the last expert is preferred; ties: integers only."""
    logits = rng.integers(-2, 3, (tokens, experts)).astype(float) if ties else rng.normal(0, 1.5, (tokens, experts))
    if ties:
        logits[0] = 0       # that there are equal ones among the greatest is left to no draw
    logits += level + slope * np.arange(experts)
    return {"logits": logits, "k": k}


SIZES = [                   # tokens, experts, k, and how the logits are
    (9, 4, 2, {}), (7, 5, 1, {"level": -6.0}), (12, 3, 2, {"ties": True}), (8, 5, 3, {"level": -9.0, "slope": 1.0}),
    (5, 3, 3, {"ties": True}), (12, 4, 1, {"ties": True}),
    (20, 40, 2, {"ties": True}), (6, 4, 2, {"level": 900.0}), (6, 4, 1, {"level": -900.0}), (0, 4, 2, {}),
    (8, 5, 2, {"ties": True, "slope": 1e-12}),
    (6, 4, 2, {"level": -1e10}),      # below whatever finite number one may think of
    (600, 2, 1, {})]                  # a queue that is longer than 8 bits can count
CAPACITIES = [(10, 4, 2, 1.25), (7, 3, 1, 1.0), (12, 4, 2, 1.5), (5, 2, 2, 2.0), (6, 4, 1, 0.5), (9, 8, 2, 0.75),
              (13, 4, 3, 1.25), (0, 4, 2, 1.25), (2049, 2048, 1, 1.0)]


def cases(rng):
    found = [dict(zip(("what", "tokens", "experts", "k", "factor"), ("capacity_of", *numbers), strict=True))
             for numbers in CAPACITIES]
    drawn = [draw(rng, tokens, experts, k, **how) for tokens, experts, k, how in SIZES]
    found += [{"what": "probabilities", "logits": one["logits"], "expert": choices(**one)} for one in drawn]
    found += [{"what": "route"} | one for one in drawn]
    found += [{"what": "route_backward", "logits": one["logits"], "expert": choices(**one),
               "dgates": rng.normal(0, 2, (len(one["logits"]), one["k"]))} for one in drawn]
    # A token's choice needn't be of the greatest logits.
    noisy = draw(rng, 7, 5, 2)["logits"], np.argsort(rng.random((7, 5)), axis=1)[:, :2]
    found.append(dict(zip(("what", "logits", "expert"), ("probabilities", *noisy), strict=True)))
    for (tokens, experts, k, capacity) in ((9, 4, 2, 3), (8, 3, 1, 2), (6, 5, 3, 4), (7, 3, 2, 7), (0, 3, 2, 2),
                                           (5, 2, 1, 9), (600, 2, 1, 320)):
        expert = choices(**draw(rng, tokens, experts, k, slope=0.6))
        found.append({"what": "rows_of", "expert": expert, "slot": queue(expert, experts), "experts": experts,
                      "capacity": capacity})
    return found


# ---------------------------------------------------------------- truth, in loops

def choices(logits, k):
    return np.array([sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in logits.tolist()],
                    int).reshape(len(logits), k)


def by_choice(tokens, k):
    """The order in which choices queue: [(token, choice)]."""
    return [(t, c) for c in range(k) for t in range(tokens)]


def queue(expert, experts, order=by_choice, begin=lambda taken, choice: None, gates=None):
    taken, slot = [0] * experts, np.zeros(expert.shape, int)
    ordered = order(*expert.shape) if gates is None else order(gates)
    before = None
    for t, c in ordered:
        if c != before:
            begin(taken, c)
            before = c
        slot[t, c] = taken[expert[t, c]]
        taken[expert[t, c]] += 1
    return slot


def among(logits, expert):
    """Whether a logit takes part in the softmax."""
    if expert.shape[1] == 1:
        return np.ones(logits.shape, bool)
    seen = np.zeros(logits.shape, bool)
    for t, chosen in enumerate(expert):
        seen[t, chosen] = True
    return seen


def shares(logits, expert, among=among):
    return softmax(np.where(among(logits, expert), logits, -np.inf))


def gates_of(logits, expert, probs):
    return np.take_along_axis(probs(logits, expert), expert, 1)


def slope(logits, expert, dgates, probs):
    """Jacobian of the softmax, token by token."""
    found = np.zeros(logits.shape)
    for t, p in enumerate(probs(logits, expert)):
        by_p = np.zeros(len(p))
        by_p[expert[t]] = dgates[t]
        found[t] = (np.diag(p) - np.outer(p, p)) @ by_p
    return found


def table(expert, slot, experts, capacity, empty=-1, name=lambda t, c, k: t):
    rows = np.full((experts, capacity), empty)
    for (t, c), e in np.ndenumerate(expert):
        if slot[t, c] < capacity:
            rows[e, slot[t, c]] = name(t, c, expert.shape[1])
    return rows


def share_of(tokens, experts, k, factor):
    return min(tokens, math.ceil(factor * k * tokens / experts))


def run(case, choose=choices, line=queue, probs=shares, gates=gates_of, back=slope, rows=table, capacity=share_of):
    """What is asked for; the keywords are the mistakes."""
    what = case["what"]
    given = {name: value for name, value in case.items() if name != "what"}
    with np.errstate(all="ignore"):
        if what == "capacity_of":
            return {"result": capacity(**given)}
        if what == "probabilities":
            return {"result": probs(**given)}
        if what == "route":
            expert = choose(case["logits"], case["k"])
            return {"expert": expert, "slot": line(expert, case["logits"].shape[1]),
                    "gates": gates(case["logits"], expert, probs)}
        return {"result": back(**given, probs=probs) if what == "route_backward" else rows(**given)}


def truth(case):
    return run(case)
