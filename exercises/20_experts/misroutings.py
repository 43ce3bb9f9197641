"""The known mistakes of 20.1."""

import math

import numpy as np

from exercises.frame import demand, gives, when

from .routing import among, choices, gates_of, queue, run, share_of, shares, slope, softmax, table

# ---------------------------------------------------------------- which experts, and which places

def last_of_equals(logits, k):
    return np.argsort(logits, axis=1, kind="stable")[:, ::-1][:, :k]


def least(logits, k):
    return np.argsort(logits, axis=1, kind="stable")[:, :k]


def by_number(logits, k):
    return np.sort(choices(logits, k), axis=1)


def likeliest_last(logits, k):
    return choices(logits, k)[:, ::-1]


def masked_with(value):
    """The greatest again and again, what was chosen being set to the value."""
    def choose(logits, k):
        left, found = logits.copy(), []
        for _ in range(k):
            found.append(left.argmax(1))
            left[np.arange(len(left)), found[-1]] = value
        return np.stack(found, 1).reshape(len(logits), k)
    return choose


def token_by_token(tokens, k):
    return [(t, c) for t in range(tokens) for c in range(k)]


def anew(taken, choice):
    taken[:] = [0] * len(taken)


def second_first(tokens, k):
    return [(t, c) for c in reversed(range(k)) for t in range(tokens)]


def last_token_first(tokens, k):
    return [(t, c) for c in range(k) for t in reversed(range(tokens))]


def likeliest_first(case):
    """Those with the greatest gate queue first."""
    if case["what"] != "route":
        return None
    def line(expert, experts):
        gates = gates_of(case["logits"], expert, shares)
        order = [(t, c) for c in range(expert.shape[1]) for t in np.argsort(-gates[:, c], kind="stable")]
        return queue(expert, experts, order=lambda tokens, k: order)
    return run(case, line=line)


def number_in_line(expert, experts):
    return np.array([[c * len(expert) + t for c in range(expert.shape[1])] for t in range(len(expert))],
                    int).reshape(expert.shape)


def others(expert, experts):
    """How many choices in all have the same expert."""
    counts = np.bincount(expert.ravel(), minlength=experts)
    return counts[expert] - 1


# ---------------------------------------------------------------- gates

def everybody(logits, expert):
    return np.ones(logits.shape, bool)


def chosen_only(logits, expert):
    return placed(logits, expert, np.ones(expert.shape), None) > 0


def over(which):
    return lambda logits, expert: shares(logits, expert, which)


def greatest_ones(case):
    if case["what"] != "probabilities":
        return None
    return run(case, probs=lambda logits, expert: shares(logits, choices(logits, expert.shape[1])))


def masked_after(logits, expert):
    """The softmax over all, with 0 for those not chosen."""
    return softmax(logits) * among(logits, expert)


def zero_logits(logits, expert):
    """What isn't chosen has the logit 0, not -inf."""
    return softmax(np.where(among(logits, expert), logits, 0.0))


def over_tokens(logits, expert):
    return softmax(np.where(among(logits, expert), logits, -np.inf), 0)


def sigmoids(logits, expert, probs):
    return 1 / (1 + np.exp(-np.take_along_axis(logits, expert, 1)))


def raw(logits, expert, probs):
    return np.take_along_axis(logits, expert, 1)


def equal(logits, expert, probs):
    return np.full(expert.shape, 1 / expert.shape[1])


def sorted_gates(logits, expert, probs):
    return np.sort(gates_of(logits, expert, probs), axis=1)


def chosen_first(logits, expert, probs):
    """Of the first k experts, not of the chosen ones."""
    return probs(logits, expert)[:, :expert.shape[1]]


# ---------------------------------------------------------------- their gradient

def placed(logits, expert, dgates, probs):
    found = np.zeros(logits.shape)
    for t, chosen in enumerate(expert):
        found[t, chosen] = dgates[t]
    return found


def diagonal(logits, expert, dgates, probs):
    p = probs(logits, expert)
    return p * (1 - p) * placed(logits, expert, dgates, probs)


def times_p(logits, expert, dgates, probs):
    return probs(logits, expert) * placed(logits, expert, dgates, probs)


def negative(logits, expert, dgates, probs):
    return -slope(logits, expert, dgates, probs)


def no_p(logits, expert, dgates, probs):
    p, dp = probs(logits, expert), placed(logits, expert, dgates, probs)
    return dp - (p * dp).sum(1, keepdims=True)


def unweighed(logits, expert, dgates, probs):
    p, dp = probs(logits, expert), placed(logits, expert, dgates, probs)
    return p * (dp - dp.sum(1, keepdims=True))


def mean_of_dp(logits, expert, dgates, probs):
    p, dp = probs(logits, expert), placed(logits, expert, dgates, probs)
    return p * (dp - dp.mean(1, keepdims=True))


def subtracted_late(logits, expert, dgates, probs):
    p, dp = probs(logits, expert), placed(logits, expert, dgates, probs)
    return p * dp - (p * dp).sum(1, keepdims=True)


def only_to_chosen(logits, expert, dgates, probs):
    return slope(logits, expert, dgates, probs) * chosen_only(logits, expert)


def no_gradient(logits, expert, dgates, probs):
    return np.zeros(logits.shape)


def by_last_choice(logits, expert, dgates, probs):
    last = np.zeros_like(dgates)
    last[:, -1] = dgates[:, -1]
    return slope(logits, expert, last, probs)


def in_order(logits, expert, dgates, probs):
    """The gradients by the gates are taken for those of experts 0, 1 …"""
    return slope(logits, np.tile(np.arange(expert.shape[1]), (len(expert), 1)), dgates,
                 lambda logits, _: probs(logits, expert))


def by_numbers(logits, expert, dgates, probs):
    return slope(logits, np.sort(expert, axis=1), dgates, lambda logits, _: probs(logits, expert))


# ---------------------------------------------------------------- rows

def crowded(expert, slot, experts, capacity):
    """What finds no place takes the last one."""
    rows = np.full((experts, capacity), -1)
    for t, c in np.ndindex(*expert.shape):
        rows[expert[t, c], min(slot[t, c], capacity - 1)] = t
    return rows


def spilled(expert, slot, experts, capacity):
    """What finds no place stands among the next expert's rows."""
    rows = np.full(experts * capacity + slot.max(initial=0) + 1, -1)
    for t, c in np.ndindex(*expert.shape):
        rows[expert[t, c] * capacity + slot[t, c]] = t
    return rows[:experts * capacity].reshape(experts, capacity)


def by_last(expert, slot, experts, capacity):
    """Places go round: slot % capacity."""
    return table(expert, slot % capacity, experts, capacity)


def first_only(expert, slot, experts, capacity):
    return table(expert[:, :1], slot[:, :1], experts, capacity)


def one_more(expert, slot, experts, capacity):
    """slot <= capacity, the last of which has no room; from 1 on."""
    return table(expert, slot + 1, experts, capacity)


def packed(expert, slot, experts, capacity):
    """In the order of tokens, not of places."""
    rows = np.full((experts, capacity), -1)
    for e in range(experts):
        tokens = np.sort(np.argwhere((expert == e) & (slot < capacity))[:, 0])
        rows[e, :len(tokens)] = tokens
    return rows


def named(t, c, k):
    return t * k + c


def named_by_choice(tokens):
    return lambda t, c, k: c * tokens + t


# ---------------------------------------------------------------- what is said

def chooses(text, **how):
    return gives(text, lambda case: run(case, **how) if case["what"] == "route" else None)


def anywhere(text, **how):
    return gives(text, lambda case: run(case, **how))


def capacity(text, f):
    def example(case, got):
        return (f"{text}: of {case['tokens']} tokens, {case['experts']} experts, k={case['k']} and factor "
                f"{case['factor']} you make {got['result']}")
    return gives(example, lambda case: run(case, capacity=f) if case["what"] == "capacity_of" else None)


def nan_of_800(case, got):
    """nan for large logits only."""
    name = "gates" if case["what"] == "route" else "result"
    return case["what"] != "capacity_of" and np.abs(case["logits"]).max(initial=0) > 800 \
        and np.isnan(np.asarray(got[name])).any()


def equals_mixed(case, got):
    """Chosen are others with the same logits."""
    if case["what"] != "route":
        return False
    found, right = np.asarray(got["expert"]), choices(case["logits"], case["k"])
    return not np.array_equal(found, right) and np.array_equal(*(
        np.take_along_axis(case["logits"], expert, 1) for expert in (found, right)))


SIGNATURES = [
    capacity("rounded down before the division: the choices needn't be an integer", lambda tokens, experts, k, factor:
             min(tokens, math.ceil(int(factor * k * tokens) / experts))),
    capacity("rounded up by adding a number a little below 1: a part of a place may be smaller, and is a place more",
             lambda tokens, experts, k, factor: min(tokens, int(factor * k * tokens / experts + 0.999))),
    capacity("rounded to the nearest: a part of a place is a place more", lambda tokens, experts, k, factor:
             min(tokens, round(factor * k * tokens / experts))),
    capacity("rounded down: a part of a place is a place more", lambda tokens, experts, k, factor:
             min(tokens, math.floor(factor * k * tokens / experts))),
    capacity("k is missing: each token makes k choices, and each takes a place", lambda tokens, experts, k, factor:
             min(tokens, math.ceil(factor * tokens / experts))),
    capacity("rounded up before the factor comes, and again after it", lambda tokens, experts, k, factor:
             min(tokens, math.ceil(factor * math.ceil(k * tokens / experts)))),
    capacity("the factor is missing", lambda tokens, experts, k, factor: min(tokens, math.ceil(k * tokens / experts))),
    capacity("more places than tokens: no token chooses an expert twice", lambda tokens, experts, k, factor:
             math.ceil(factor * k * tokens / experts)),
    capacity("one place too many where the shares come out even: the next integer above, if it isn't one",
             lambda tokens, experts, k, factor: min(tokens, math.floor(factor * k * tokens / experts) + 1)),
    capacity("a place at least, also where there are no tokens: never more places than tokens",
             lambda tokens, experts, k, factor: max(1, share_of(tokens, experts, k, factor))),
    capacity("divided by k: each token makes k choices", lambda tokens, experts, k, factor:
             min(tokens, math.ceil(factor * tokens / experts / k))),

    chooses("the gates are in another order than the experts: gates[t, c] belongs to expert[t, c]", gates=sorted_gates),
    chooses("the experts with the smallest logits are chosen", choose=least),
    chooses("the experts are right, but the likeliest stands last: it is the first choice", choose=likeliest_last),
    chooses("among equal logits the last expert is chosen; a sort turned round turns equal ones round as well",
            choose=last_of_equals),
    when("among equal logits the lowest number comes first: np.argsort leaves equal ones in order only with "
         "kind=\"stable\", and only if nothing is turned round behind it", equals_mixed),
    chooses("the chosen experts stand in the order of their numbers, not of their logits (np.argpartition doesn't "
            "sort): the likeliest is the first choice, and queues first", choose=by_number),
    chooses("a chosen expert's logit is set to 0, or another finite number, before the next choice; where logits are "
            "below that it is the greatest, and chosen again. Set it to -inf", choose=masked_with(0.0)),

    chooses("two logits that differ in their last digits are taken for equal, or exchanged: they are rounded, or "
            "moved, before they are sorted. A stable sort of them as they are puts equal ones in order, and no others",
            choose=lambda logits, k: choices(np.round(logits, 6), k)),
    gives("the softmax is over the experts with the greatest logits, whatever is in `expert`: a router with noise "
          "chooses others", greatest_ones),

    chooses("the queue goes token by token: a token's second choice stands before the next token's first. All first "
            "choices come before all second ones", line=lambda expert, experts: queue(expert, experts, token_by_token)),
    chooses("the places are right, but not whose they are: of a line of k · tokens numbers, first choices in front, "
            "reshape(tokens, k) makes pairs of neighbours. reshape(k, tokens), and transpose that",
            line=lambda expert, experts: queue(expert, experts).T.reshape(expert.shape)),
    chooses("the second choices queue anew from place 0, where the first choices stand already",
            line=lambda expert, experts: queue(expert, experts, begin=anew)),
    chooses("the last choices queue first", line=lambda expert, experts: queue(expert, experts, second_first)),
    chooses("the last token queues first", line=lambda expert, experts: queue(expert, experts, last_token_first)),
    gives("the tokens with the greatest gates queue first. That may be wise (Riquelme et al. 2021), but then what a "
          "token gets depends on all later ones; asked for is the tokens' order", likeliest_first),
    chooses("slots are counted from 1; the first in a queue has nobody before it",
            line=lambda expert, experts: queue(expert, experts) + 1),
    *(chooses("the choices of an expert are counted in 8 bits: its queue may be longer than these can count",
              line=lambda expert, experts, bits=bits: queue(expert, experts).astype(bits)) for bits in ("u1", "i1")),
    chooses("slot is the place in one line of all choices: each expert has a queue of its own", line=number_in_line),
    chooses("slot is how many choose the same expert, before and after: only those before count", line=others),

    anywhere("the gates are numbers of the softmax over all experts, and don't add up to 1: with k > 1 it is the "
             "softmax over the chosen ones", probs=over(everybody)),
    anywhere("the softmax is over all experts, and what isn't chosen is set to 0 after it: so the rest doesn't add up "
             "to 1. Leave the others out before", probs=masked_after),
    anywhere("with k = 1 the softmax is over the one chosen expert: the gate is 1 whatever the logit is, and has no "
             "gradient. The router would never learn", probs=over(chosen_only)),
    anywhere("what isn't chosen gets the logit 0, or another finite number, whose exp is a weight beside that of "
             "logits as low: it takes -inf", probs=zero_logits),
    anywhere("the softmax is over the tokens: axis 1 is the experts'", probs=over_tokens),
    chooses("the gates are logits: they take a softmax", gates=raw),
    anywhere("with k = 1 that is a sigmoid of each logit by itself; asked for is the softmax over all experts",
             probs=lambda logits, expert: shares(logits, expert) if expert.shape[1] > 1 else 1 / (1 + np.exp(-logits))),
    chooses("the gates are sigmoids, each expert by itself; asked for is a softmax", gates=sigmoids),
    chooses("all gates are equal: then the router has no gradient", gates=equal),
    chooses("these are the probabilities of experts 0, 1 …, not those of the chosen ones: np.take_along_axis",
            gates=chosen_first),

    anywhere("the gradient by the gates is put at the chosen logits as it is; between gate and logit stands a softmax",
             back=placed),
    anywhere("with k = 1 only the chosen logit gets a gradient: the gate is a probability among all experts, and the "
             "others' logits make it smaller", back=only_to_chosen),
    anywhere("only the diagonal of the softmax's Jacobian, p (1 - p): a logit moves the other gates as well",
             back=diagonal),
    anywhere("p (dp - Σ p dp): the sum is missing. If all dp are equal nothing may come out", back=times_p),
    anywhere("p (dp - Σ p dp): the factor p is missing", back=no_p),
    anywhere("p (dp - Σ p dp): in the sum p is missing", back=unweighed),
    anywhere("p (dp - Σ p dp): the sum is weighed by p; it isn't the mean", back=mean_of_dp),
    anywhere("p (dp - Σ p dp): p stands before both terms", back=subtracted_late),
    anywhere("the sign of the gradient", back=negative),
    anywhere("no gradient at all: the choice has none, but the gates have", back=no_gradient),
    anywhere("only the last choice's gradient is there: each adds its own", back=by_last_choice),
    anywhere("the gradients by the gates are put at experts 0, 1 …: gate c belongs to expert[:, c]", back=in_order),

    anywhere("the gradients by the gates are put at the chosen experts in the order of their numbers: gate c belongs "
             "to expert[:, c]", back=by_numbers),

    anywhere("an empty place holds 0, which is token 0: it takes -1", rows=lambda **given: table(**given, empty=0)),
    anywhere("what finds no place overwrites the last one: it is dropped", rows=crowded),
    anywhere("what finds no place stands among the next expert's rows: it is dropped", rows=spilled),
    anywhere("what finds no place begins again at place 0, and overwrites: it is dropped", rows=by_last),
    anywhere("rows hold the numbers of choices, token · k + choice; asked for is the token's",
             rows=lambda **given: table(**given, name=named)),
    anywhere("rows hold the numbers in the line of all choices; asked for is the token's",
             rows=lambda **given: table(**given, name=named_by_choice(len(given["expert"])))),
    anywhere("only the first choices are there", rows=first_only),
    anywhere("all stand one place too far: slots are counted from 0", rows=one_more),
    anywhere("the tokens stand in their own order: each has its place, slot", rows=packed),
    when("nan: exp overflows, or the sum of what doesn't is 0. Subtract the greatest logit before; softmax is given",
         nan_of_800),
]


# ---------------------------------------------------------------- integers

COUNTED = {"capacity_of": ("result",), "route": ("expert", "slot"), "rows_of": ("result",)}


def floats(case, got):
    """What counts or numbers something, and isn't an integer."""
    return [name.replace("result", "the result") for name in COUNTED.get(case["what"], ())
            if np.asarray(got[name]).dtype.kind not in "iu"]


def some(case):
    return "" if len(case.get("logits", "some")) else " without tokens"


DEMANDS = [demand(lambda case, got: f"right, but floats: {' and '.join(floats(case, got))} of {case['what']}"
                                    f"{some(case)} must be integers. NumPy takes nothing else for an index or a length "
                                    "(20.3)",
                  lambda case, got: not floats(case, got))]
