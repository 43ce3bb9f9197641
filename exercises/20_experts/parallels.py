"""20.3 in one process that has everybody's tokens and experts, and what the ranks get with a mistake in it.

A list has an item per rank.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from . import balances, routing

SIZE, HIDDEN = 5, 6
NAMES = ("router", "up", "down")
# Experts per rank, k, capacity, forwards, tokens of ranks 0, 1 … No rank's tokens are a multiple of the experts that
# can be chosen, all but one: of equal shares the balance loss has no gradient, and what is seen is rounding. In the
# first two layers some choice is always dropped, in the others none. The last one's parameters are changed before its
# pass.
LAYERS = ((2, 2, 2, 3, (6, 0, 8, 3)), (1, 1, 1, 1, (5, 0, 7, 4)), (2, 3, 9, 1, (4, 0, 6, 3)),
          (2, 2, 9, 1, (6, 0, 8, 3)))
ORDER = 1, 2, 0         # in which three forwards have their backwards


# ---------------------------------------------------------------- cases

def draw_rows(rng, ranks, what, per_rank, capacity):
    """Rows that no two ranks, experts or places have alike."""
    shape = (ranks * per_rank, capacity, SIZE) if what == "to_experts" else (per_rank, ranks * capacity, SIZE)
    drawn = [rng.standard_normal(shape) for _ in range(ranks)]
    return [{"what": what, "rows": rows} for rows in drawn]


def draw_layer(rng, ranks, per_rank, k, capacity, passes, tokens):
    """The last expert but one is chosen by nobody, the first by most."""
    experts = ranks * per_rank
    whole = {"router": rng.normal(0, 1, (SIZE, experts)), "up": rng.normal(0, 0.6, (experts, SIZE, HIDDEN)),
             "down": rng.normal(0, 0.6, (experts, HIDDEN, SIZE))}
    whole["router"][0] = 0.4 * np.arange(experts)[::-1]
    whole["router"][0, -2] = -60
    found = []
    for rank in range(ranks):
        params = {name: x if name == "router" else x[rank * per_rank:(rank + 1) * per_rank]
                  for name, x in whole.items()}
        steps = []
        for _ in range(passes):
            x, dy = rng.standard_normal((2, tokens[rank], SIZE))
            x[:, 0] = 1
            steps.append({"x": x, "dy": dy, "weight": float(rng.uniform(1, 3))})
        found.append({"what": "layer", "params": params, "k": k, "capacity": capacity, "passes": steps,
                      "order": list(ORDER[-passes:]), "changes": passes == 1 and k == 2})
    return found


def draw_grads(rng, ranks, ep):
    """The ranks along ep are neighbours. One array has three axes like the experts', and two have names like theirs."""
    shapes = {"router": (3, 4), "bias": (5,), "up": (2, 3, 2), "down": (2, 2, 3), "downscale": (2, 1, 3),
              "lookup": (4,)}
    return [{"what": "gradients", "ep": ep, "count": int(rng.integers(3, 30)), "grads":
             {name: rng.standard_normal(shape) for name, shape in shapes.items()}} for _ in range(ranks)]


def cases(rng, ranks):
    found = [draw_rows(rng, ranks, what, *sizes) for what in ("to_experts", "to_tokens")
             for sizes in ((2, 3), (1, 4), (3, 1))]
    found += [[rank | {"rows": rank["rows"].astype(np.float32)} for rank in draw_rows(rng, ranks, what, 2, 2)]
              for what in ("to_experts", "to_tokens")]
    found += [draw_layer(rng, ranks, *sizes) for sizes in LAYERS]
    return found + [draw_grads(rng, ranks, ep) for ep in ((2, 4, 1) if ranks == 4 else (3, 1))]


# ---------------------------------------------------------------- the two ways

def to_experts(parts):
    """Expert by expert, rank by rank."""
    n, here = len(parts), len(parts[0]) // len(parts)
    return [np.stack([np.concatenate([rows[expert] for rows in parts])
                      for expert in range(r * here, (r + 1) * here)]) for r in range(n)]


def to_tokens(parts):
    n, places = len(parts), parts[0].shape[1] // len(parts)
    return [np.concatenate([of[:, r * places:(r + 1) * places] for of in parts]) for r in range(n)]


# ---------------------------------------------------------------- the layer

def add(found, logits, x, taken, gates):
    return (found * gates[..., None]).sum(1)


def first_choices(expert):
    return expert[:, 0]


def same(values):
    return values


def forward_gates(gates, placed):
    return gates


def lost(answers, expert, slot, x):
    """The answer to a choice that found no place."""
    return np.zeros(x.shape[-1])


def answers_of(one, answers, missing):
    """[tokens, k, size]"""
    expert, slot, x = one["expert"], one["slot"], one["x"]
    found = np.zeros((*expert.shape, SIZE))
    for t, c in np.ndindex(*expert.shape):
        found[t, c] = answers[expert[t, c], slot[t, c]] if slot[t, c] < answers.shape[1] else \
            missing(answers, expert[t, c], slot[t, c], x[t])
    return found


def by_token(one, drows):
    """The gradient by x, of the rows that its tokens had."""
    found = np.zeros(one["x"].shape)
    for (e, place), token in np.ndenumerate(one["rows"]):
        if token >= 0:
            found[token] += drows[e, place]
    return found


def overwritten(one, drows):
    """dx[rows] += …: of a token that stands in two rows, the last one."""
    found = np.zeros(one["x"].shape)
    for (e, place), token in np.ndenumerate(one["rows"]):
        if token >= 0:
            found[token] = drows[e, place]
    return found


def mlp(x, up, down):
    z = x @ up
    t = np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z ** 3))
    return (0.5 * z * (1 + t)) @ down


def mlp_back(x, up, down, dy):
    z = x @ up
    inner = np.sqrt(2 / np.pi) * (z + 0.044715 * z ** 3)
    slope = 0.5 * (1 + np.tanh(inner)) + 0.5 * z * np.sqrt(2 / np.pi) * (1 + 0.134145 * z ** 2) / np.cosh(inner) ** 2
    dz = np.einsum("ers,ehs->erh", dy, down) * slope
    return (np.einsum("erh,esh->ers", dz, up), np.einsum("ers,erh->esh", x, dz),
            np.einsum("erh,ers->ehs", 0.5 * z * (1 + np.tanh(inner)), dy))


class Pass(NamedTuple):
    """Inputs of a rank and of one pass; two are equal if they are the same objects."""

    rank: dict
    step: dict

    def __eq__(self, other):
        return self.rank is other.rank and self.step is other.step

    def __hash__(self):
        return hash((id(self.rank), id(self.step)))


@lru_cache(maxsize=64)
def chosen(given):
    """All of a rank's routing of one pass, which most of the mistakes leave as it is: worked out once for all."""
    x = given.step["x"]
    logits = x @ given.rank["params"]["router"]
    expert = routing.choices(logits, given.rank["k"])
    slot = routing.queue(expert, logits.shape[1])
    return {"x": x, "logits": logits, "expert": expert, "slot": slot, "balance": balance_of(logits, expert),
            "gates": np.take_along_axis(routing.shares(logits, expert), expert, 1),
            "rows": routing.table(expert, slot, logits.shape[1], given.rank["capacity"])}


def balance_of(logits, expert, choices=first_choices):
    return balances.balance({"what": "balance_loss", "logits": logits, "first": choices(expert)})


def routed(rank, step, gate=forward_gates, choices=first_choices):
    found = chosen(Pass(rank, step))
    balance = found["balance"] if choices is first_choices else balance_of(found["logits"], found["expert"], choices)
    return found | {"gates": gate(found["gates"], found["slot"] < rank["capacity"]), "balance": balance}


def gather(one, before):
    found = np.zeros((*one["rows"].shape, SIZE))
    for (e, place), token in np.ndenumerate(one["rows"]):
        if token >= 0:
            gate = one["gates"][token][one["expert"][token] == e][0] if before else 1.0
            found[e, place] = gate * one["x"][token]
    return found


def weighed(one, dy, by_gate):
    """The gradient by the experts' answers."""
    found = np.zeros((*one["rows"].shape, SIZE))
    for (e, place), token in np.ndenumerate(one["rows"]):
        if token >= 0:
            found[e, place] = dy[token] * (one["gates"][token][one["expert"][token] == e][0] if by_gate else 1.0)
    return found


def layer(case, there=to_experts, back=to_tokens, gate=forward_gates, missing=lost, choices=first_choices, sum_=add,
          before=False, by_gate=True, dgate=lambda found, one, dy: (found * dy[:, None]).sum(2), by_x=by_token,
          aux=lambda weight, n: weight, from_router=True, from_experts=True, of_gates=True, experts_grad=same,
          router_grad=same, back_there=None, back_back=None, balance=same, balances_value=same,
          kept=lambda order, number: number):
    """{"ys", "balances", "dxs", "grads"} of each rank."""
    back_there, back_back = back_there or there, back_back or back
    made = [{"ys": [], "balances": [], "dxs": [], "grads": []} for _ in case]
    passes = []
    for number in range(len(case[0]["passes"])):
        ones = [routed(rank, rank["passes"][number], gate, choices) for rank in case]
        came = there([gather(one, before) for one in ones])
        answers = back([mlp(x, rank["params"]["up"], rank["params"]["down"])
                        for x, rank in zip(came, case, strict=True)])
        for one, x, answer in zip(ones, came, answers, strict=True):
            one |= {"came": x, "found": answers_of(one, answer, missing)}
        values = balances_value([one["balance"]["loss"] for one in ones])
        for one, out, value in zip(ones, made, values, strict=True):
            out["ys"].append(sum_(one["found"], one["logits"], one["x"], one["slot"] < case[0]["capacity"],
                                  np.ones_like(one["gates"]) if before else one["gates"]))
            out["balances"].append(value)
        passes.append(ones)
    for number in range(len(passes)):
        ones = passes[kept(case[0]["order"], number)]
        backwards(case, ones, number, made, by_gate, dgate, by_x, aux, from_router, from_experts, of_gates,
                  experts_grad, router_grad, back_there, back_back, balance)
    return made


def backwards(case, ones, number, made, by_gate, dgate, by_x, aux, from_router, from_experts, of_gates, experts_grad,
              router_grad, back_there, back_back, balance):
    steps = [rank["passes"][number] for rank in case]
    came = back_there([weighed(one, step["dy"], by_gate) for one, step in zip(ones, steps, strict=True)])
    grads = [mlp_back(one["came"], rank["params"]["up"], rank["params"]["down"], dy)
             for one, rank, dy in zip(ones, case, came, strict=True)]
    home = back_back([of[0] for of in grads])
    routers, dxs = [], []
    for one, step, rank, drows in zip(ones, steps, case, home, strict=True):
        by_logits = routing.slope(one["logits"], one["expert"], dgate(one["found"], one, step["dy"]), routing.shares)
        dlogits = of_gates * by_logits + aux(step["weight"], len(case)) * balance(one["balance"]["grad"])
        routers.append(one["x"].T @ dlogits)
        dxs.append(from_experts * by_x(one, drows) + from_router * dlogits @ rank["params"]["router"].T)
    ups, downs, routers = (experts_grad([of[1] for of in grads]), experts_grad([of[2] for of in grads]),
                           router_grad(routers))
    for out, *of in zip(made, dxs, routers, ups, downs, strict=True):
        out["dxs"].append(of[0])
        out["grads"].append(dict(zip(NAMES, of[1:], strict=True)))


# ---------------------------------------------------------------- gradients of all ranks

def groups(case, along):
    """[the ranks that sum with rank r]. along: names of axes."""
    n, ep = len(case), case[0]["ep"]
    return [[s for s in range(n) if ("dp" in along or s // ep == r // ep) and ("ep" in along or s % ep == r % ep)]
            for r in range(n)]


def gradients(case, experts=("dp",), dense=("dp", "ep"), experts_by=("dp", "ep"), dense_by=("dp", "ep"),
              count=lambda case, group, rank: sum(case[s]["count"] for s in group),
              of=lambda rank, name: rank["grads"][name]):
    """The axes along which gradients are summed, and along which samples are counted."""
    found = []
    for r, rank in enumerate(case):
        out = {}
        for name in rank["grads"]:
            is_expert = name in ("up", "down")
            summed, counted = (experts, experts_by) if is_expert else (dense, dense_by)
            total = sum(of(case[s], name) for s in groups(case, summed)[r])
            out[name] = total / count(case, groups(case, counted)[r], r)
        found.append({"grads": out})
    return found


def run(case, **how):
    """What is asked for; the keywords are the mistakes, of which only those of the case's function count."""
    what = case[0]["what"]
    mine = {name: value for name, value in how.items() if name in TAKEN[what]}
    if what in ("to_experts", "to_tokens"):
        ways = {"to_experts": to_experts, "to_tokens": to_tokens}
        way = mine.get("there" if what == "to_experts" else "back", ways[what])
        return [{"result": rows} for rows in way([rank["rows"] for rank in case])]
    if what == "layer":
        return layer(case, **mine)
    return gradients(case, **mine) if what == "gradients" else [{}] * len(case)


TAKEN = {"to_experts": ("there",), "to_tokens": ("back",), "layer": layer.__code__.co_varnames,
         "gradients": gradients.__code__.co_varnames, "training": ()}


def truth(case):
    return run(case)
