"""The known mistakes of 20.3, and what is asked of its messages."""

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import same

from . import parallels
from .drive import other
from .parallels import SIZE

# ---------------------------------------------------------------- on the way


def no_transpose(parts):
    """What has arrived, reshaped as if experts came first."""
    n, here = len(parts), len(parts[0]) // len(parts)
    return [np.concatenate([rows[r * here:(r + 1) * here] for rows in parts]).reshape(here, -1, SIZE)
            for r in range(n)]


def back_no_transpose(parts):
    n = len(parts)
    here, places = len(parts[0]), parts[0].shape[1] // n
    flat = [rows.reshape(here * n, places, SIZE) for rows in parts]
    return [np.concatenate([rows[r * here:(r + 1) * here] for rows in flat]) for r in range(n)]


def interleaved(parts):
    """Place by place instead of rank by rank."""
    n = len(parts)
    return [rows.reshape(len(rows), n, -1, SIZE).transpose(0, 2, 1, 3).reshape(rows.shape)
            for rows in parallels.to_experts(parts)]


def back_interleaved(parts):
    n = len(parts)
    return parallels.to_tokens([rows.reshape(len(rows), -1, n, SIZE).transpose(0, 2, 1, 3).reshape(rows.shape)
                                for rows in parts])


def dealt(parts):
    """Expert e is on rank e % n."""
    n, here = len(parts), len(parts[0]) // len(parts)
    order = [e for r in range(n) for e in range(r, n * here, n)]
    return parallels.to_experts([rows[order] for rows in parts])


def back_dealt(parts):
    n, here = len(parts), len(parts[0])
    order = np.argsort([e for r in range(n) for e in range(r, n * here, n)])
    return [rows[order] for rows in parallels.to_tokens(parts)]


def reversed_ranks(parts):
    """The last rank's rows first."""
    n = len(parts)
    return [rows.reshape(len(rows), n, -1, SIZE)[:, ::-1].reshape(rows.shape) for rows in parallels.to_experts(parts)]


def back_reversed(parts):
    n = len(parts)
    return parallels.to_tokens([rows.reshape(len(rows), n, -1, SIZE)[:, ::-1].reshape(rows.shape) for rows in parts])


def own_only(parts):
    """Nothing is sent: this rank's rows, those for others taken for its own."""
    n = len(parts)
    return [rows.reshape(len(rows) // n, -1, SIZE) for rows in parts]


def back_own(parts):
    n = len(parts)
    return [rows.reshape(len(rows) * n, -1, SIZE) for rows in parts]


def swapped_own(parts):
    """Nothing is sent, but axes are swapped."""
    n = len(parts)
    return [rows.reshape(n, len(rows) // n, -1, SIZE).transpose(1, 0, 2, 3).reshape(len(rows) // n, -1, SIZE)
            for rows in parts]


def back_swapped_own(parts):
    n = len(parts)
    return [rows.reshape(len(rows), n, -1, SIZE).transpose(1, 0, 2, 3).reshape(len(rows) * n, -1, SIZE)
            for rows in parts]


# ---------------------------------------------------------------- in the layer

def nearest_place(answers, expert, slot, x):
    return answers[expert, -1]


def first_place(answers, expert, slot, x):
    return answers[expert, 0]


def next_expert(answers, expert, slot, x):
    """The place behind the last one is the next expert's first."""
    flat = answers.reshape(-1, SIZE)
    return flat[min(expert * answers.shape[1] + slot, len(flat) - 1)]


def around(answers, expert, slot, x):
    return answers[expert, slot % answers.shape[1]]


def itself(answers, expert, slot, x):
    return x


def renormalised(gates, placed):
    kept = gates * placed
    whole = kept.sum(1, keepdims=True)
    return np.where(whole > 0, kept / np.where(whole > 0, whole, 1), 0)


def unweighed(found, logits, x, taken, gates):
    return found.sum(1)


def mean(found, logits, x, taken, gates):
    return found.mean(1)


def first_answer(found, logits, x, taken, gates):
    return found[:, 0] * gates[:, :1]


def halved(found, logits, x, taken, gates):
    return (found * gates[..., None]).mean(1)


def residual(found, logits, x, taken, gates):
    return x + (found * gates[..., None]).sum(1)


def residual_of_dropped(found, logits, x, taken, gates):
    return np.where(taken.any(1)[:, None], (found * gates[..., None]).sum(1), x)


def last_choices(expert):
    return expert[:, -1]


def total(values):
    return [sum(values)] * len(values)


def average(values):
    return [sum(values) / len(values)] * len(values)


def part(values):
    return [value / len(values) for value in values]


def layer(text, **how):
    return gives(text, lambda case: parallels.run(case, **how) if case[0]["what"] == "layer" else None)


def gated_again(one, drows):
    """The gradient by x, of rows that are multiplied by their gates."""
    weights = np.zeros(one["rows"].shape)
    for t, c in np.ndindex(*one["expert"].shape):
        if one["slot"][t, c] < weights.shape[1]:
            weights[one["expert"][t, c], one["slot"][t, c]] = one["gates"][t, c]
    return parallels.by_token(one, drows * weights[..., None])


def router_by_tokens(case):
    if case[0]["what"] != "layer":
        return None
    tokens = [max(len(rank["passes"][0]["x"]), 1) for rank in case]
    return parallels.layer(case, router_grad=lambda grads: [g / n for g, n in zip(grads, tokens, strict=True)])


def of_another(*names):
    """The layer with these settings of the second one, which drive.py makes."""
    return gives("a layer is changed when a second one is made: what __init__ keeps belongs to the object (self), not "
                 "to the class or the module", lambda case: parallels.layer(
                     [rank | {name: other(rank)[name] for name in names} for rank in case])
                 if case[0]["what"] == "layer" else None)


def anywhere(text, **how):
    return gives(text, lambda case: parallels.run(case, **how))


def way(text, there, back):
    """Of one of the two ways, or of both."""
    return [anywhere(text, **how) for how in ({"there": there}, {"back": back}, {"there": there, "back": back})]


def grads(text, **how):
    return gives(text, lambda case: parallels.run(case, **how) if case[0]["what"] == "gradients" else None)


def own_count(case, group, rank):
    return case[rank]["count"]


def mean_of_means(rank, name):
    return rank["grads"][name] / rank["count"]


def last_alone(case, got):
    """Of several forwards under way all answers are right, and the gradients of the last one."""
    if case[0]["what"] != "layer" or passes(case) < 2:
        return False
    for rank, right in zip(got, parallels.truth(case), strict=True):
        pairs = [*zip(rank["ys"], right["ys"], strict=True), (rank["dxs"][-1], right["dxs"][-1]),
                 *((rank["grads"][-1][name], x) for name, x in right["grads"][-1].items())]
        if not all(same(x, y, 1e-9) for x, y in pairs):
            return False
    return True


SIGNATURES = [
    *way("what has arrived is reshaped, but its first axis is still where from, and then which expert: swap them first",
         no_transpose, back_no_transpose),
    *way("an expert's rows are mixed place by place: all of rank 0's stand first, then all of rank 1's", interleaved,
         back_interleaved),
    *way("the experts are dealt out, e to rank e % N: rank r has those from r·E/N on", dealt, back_dealt),
    *way("the last rank's rows stand first", reversed_ranks, back_reversed),
    *way("nothing is sent: these are this rank's own rows, in another shape", own_only, back_own),
    *way("nothing is sent: these are this rank's own rows, in another shape", swapped_own, back_swapped_own),

    layer("the gates are missing: y is the sum of the answers, weighed by nothing", sum_=unweighed),
    layer("y is the mean of the answers; asked for is their sum, weighed by the gates", sum_=mean),
    layer("y is the mean over the choices of gate · answer: the gates weigh already", sum_=halved),
    layer("only the first choice's answer is in y", sum_=first_answer),
    layer("x is added to y: the residual connection is around the layer, not in it", sum_=residual),
    layer("where all choices were dropped y is x: it is 0 there. The residual connection around the layer adds x",
          sum_=residual_of_dropped),
    layer("gates multiply the tokens before the experts; an expert isn't linear, they multiply the answers",
          before=True),
    layer("the gates of what found a place are divided by their sum: what is dropped is missing, nobody takes its part",
          gate=renormalised),
    layer("a choice that was dropped gets the answer to the expert's last row, another token's", missing=nearest_place),
    layer("a choice that was dropped gets the answer to the expert's first row, another token's", missing=first_place),
    layer("a choice that was dropped gets the answer at the place behind the last one, which is the next expert's",
          missing=next_expert),
    layer("a choice that was dropped gets the answer at slot % capacity, another token's", missing=around),
    layer("a choice that was dropped has x for an answer: it is 0", missing=itself),
    layer("the balance loss is of the last choices: f counts the first ones", choices=last_choices),
    layer("the balance losses of the ranks are summed: each gives that of its own tokens",
          balances_value=total),
    layer("the balance losses of the ranks are averaged: each gives that of its own tokens", balances_value=average),

    *[of_another(*names)
      for names in (("params", "k", "capacity"), ("params",), ("k", "capacity"), ("k",), ("capacity",))],
    layer("the several forwards under way share what backward needs: these are gradients of the last one's. Return it, "
          "and keep nothing in self", kept=lambda order, number: -1),
    layer("the several forwards under way have their backwards in any order, and here it is that of the forwards: "
          "take `kept`, which is of the same pass, and keep nothing in self",
          kept=lambda order, number: order.index(number)),
    layer("the several forwards under way have their backwards in any order, and here it is the reverse of the "
          "forwards': take `kept`, which is of the same pass, and keep nothing in self",
          kept=lambda order, number: -1 - order.index(number)),
    when("of several forwards under way the last one's gradients are right, the others' aren't: something that "
         "backward takes is the last one's. All of it belongs into `kept`, and nothing into self", last_alone),
    when("the parameters are those that there were when the layer was made: an optimizer changes their arrays in "
         "place. Keep the arrays themselves, and no copies", lambda case, got: case[0].get("changes", False)),
    layer("the gradient by x is that of one row only: a token with two places stands in two rows, and `dx[rows] += …` "
          "takes the last. np.add.at adds them all", by_x=parallels.overwritten),
    layer("the gradient by x lacks the router's: the logits are made of x, too", from_router=False),
    layer("the gradient by x is the router's only: the rows' gradients must come home, too", from_experts=False),
    layer("the gradient by x is weighed by the gates once more: the answers' gradients were, before they went to the "
          "experts", by_x=gated_again),
    *[layer("the rows' gradients stay where the experts are, or are taken for this rank's: to_tokens brings them home, "
            "as it did the answers", back_back=own) for own in (back_own, back_swapped_own)],
    *[layer("the answers' gradients don't travel to where the experts are: to_experts takes them there, as it did the "
            "tokens", back_there=own) for own in (own_only, swapped_own)],
    layer("the gates have no gradient: then the router learns from the balance loss alone, and never which expert is "
          "good", of_gates=False),
    layer("the balance loss has no gradient here: weight times what balance_loss gave goes to the logits",
          aux=lambda weight, n: 0.0),
    layer("the balance loss's gradient isn't multiplied by weight", aux=lambda weight, n: 1.0),
    layer("the balance loss's gradient is divided by the number of ranks: weight is this rank's, and says all",
          aux=lambda weight, n: weight / n),
    layer("the balance loss's gradient is multiplied by the number of ranks: weight is this rank's, and says all",
          aux=lambda weight, n: weight * n),
    layer("the balance loss's gradient comes twice", aux=lambda weight, n: 2 * weight),
    layer("the gradient by the answers lacks the gates: y is gate · answer", by_gate=False),
    layer("the gradient by the gates is Σ dy · answer; the gate itself isn't in it", dgate=lambda found, one, dy:
          (found * dy[:, None]).sum(2) * one["gates"]),
    layer("the gradient by the gates is the mean over the features; Σ dy · answer is a sum",
          dgate=lambda found, one, dy: (found * dy[:, None]).mean(2)),
    layer("the gradient by the gates lacks the answers: it is Σ dy · answer", dgate=lambda found, one, dy:
          np.where((one["slot"] < one["rows"].shape[1]), dy.sum(1, keepdims=True), 0)),
    layer("the gradient by the gates lacks the answers: it is Σ dy · answer, and 0 for what was dropped",
          dgate=lambda found, one, dy: np.tile(dy.sum(1, keepdims=True), (1, found.shape[1]))),
    layer("the experts' gradients are summed over the ranks, but each rank has other experts. All tokens have come to "
          "them: their gradients are complete", experts_grad=total),
    layer("the experts' gradients are averaged over the ranks, but each rank has other experts", experts_grad=average),
    layer("the experts' gradients are divided by the number of ranks: they are sums over all tokens that came",
          experts_grad=part),
    layer("the router's gradient is summed over the ranks already: backward gives what this rank knows; "
          "global_gradients sums", router_grad=total),
    gives("the router's gradient is divided by this rank's tokens: Σ dy · y is a sum over them", router_by_tokens),
    layer("the router's gradient is averaged over the ranks: backward gives what this rank knows", router_grad=average),

    grads("every gradient is summed over all ranks; along ep the experts are different ones, and their sum is no "
          "gradient of any", experts=("dp", "ep")),
    grads("the experts' gradients aren't summed at all: along dp other ranks hold the same ones", experts=()),
    grads("the experts' gradients are summed along ep, where the experts are different; along dp they are the same",
          experts=("ep",)),
    grads("all that isn't the experts' is summed along dp only, and the ranks along ep drift apart: they hold it "
          "alike, and have samples of their own", dense=("dp",)),
    grads("all that isn't the experts' is summed along ep only: the ranks along dp hold it alike as well",
          dense=("ep",)),
    grads("nothing is summed: these are each rank's own gradients", experts=(), dense=()),
    grads("the experts' gradients are divided by the samples along dp: all ranks' samples have come to them, and count",
          experts_by=("dp",)),
    grads("the gradients are divided by the samples along dp: those along ep are other samples", experts_by=("dp",),
          dense_by=("dp",)),
    grads("all that isn't the experts' is divided by the samples along ep: those along dp are other samples",
          dense_by=("ep",)),
    grads("the gradients are divided by the samples along ep: those along dp are other samples", experts_by=("ep",),
          dense_by=("ep",)),
    grads("divided by this rank's samples: the sum is over all ranks', so divide by their sum", count=own_count),
    grads("mean of means: the ranks have different numbers of samples. Sum, then divide once by all samples",
          of=mean_of_means, count=lambda case, group, rank: len(group)),
    grads("divided by the number of ranks; it is the number of samples", count=lambda case, group, rank: len(case)),
    grads("each gradient is divided by the number of ranks that summed it; it is the number of all samples",
          experts_by=("dp",), count=lambda case, group, rank: len(group)),
    grads("divided by N times this rank's samples: the ranks have different numbers",
          count=lambda case, group, rank: len(case) * case[rank]["count"]),
    grads("not divided: that is the gradient of the sum of losses", count=lambda case, group, rank: 1),
    grads("every rank divides its own gradient before the sum, by its own number of samples: sum first, then divide",
          of=mean_of_means, count=lambda case, group, rank: 1),
    when("the gradients come back with the parameters' names as they were given: {\"router\": …}",
         lambda case, got: case[0]["what"] == "gradients" and any(
             set(rank["grads"]) != set(given["grads"]) for rank, given in zip(got, case, strict=True))),
]


# ---------------------------------------------------------------- messages

def of(what, holds):
    return lambda case, got: case[0]["what"] != what or holds(case, got)


def passes(case):
    return len(case[0]["passes"])


def bytes_of(case):
    """That a rank has to send in a layer, in all passes: two all-to-alls forward, two backward."""
    n, experts = len(case), case[0]["params"]["router"].shape[1]
    return passes(case) * 4 * (n - 1) * experts * case[0]["capacity"] * SIZE * 8 // n


def sent(rank):
    return sum(rank.sent.values())


DEMANDS = [
    demand(lambda case, got: f"right, but {max(len(rank.calls) for rank in got) / passes(case):g} messages per forward "
                             "and backward; four are enough: tokens there and back, gradients there and back",
           of("layer", lambda case, got: all(len(rank.calls) <= 4 * passes(case) for rank in got))),
    demand(lambda case, got: f"right, but a rank sends {max(map(sent, got)):,} bytes where {bytes_of(case):,} are "
                             "enough, 4 · (N-1)/N · E · capacity · size · 8: a row goes to its expert's rank, not to "
                             "all",
           of("layer", lambda case, got: all(sent(rank) <= bytes_of(case) for rank in got))),
    demand(lambda case, got: f"right, but {', '.join(next(r['changed'] for r in got if r['changed']))} changed under "
                             "the caller's hands: what is given stays as it is. Work on copies",
           lambda case, got: not any(rank.get("changed") for rank in got)),
    demand(lambda case, got: f"right, but {case[0]['what']} makes {np.asarray(got[0]['result']).dtype} of rows in "
                             f"{case[0]['rows'].dtype}: their dtype stays, or a message gets larger or a number worse",
           lambda case, got: "rows" not in case[0] or all(np.asarray(rank["result"]).dtype == case[0]["rows"].dtype
                                                          for rank in got)),
    demand(lambda case, got: f"right, but the next {case[0]['what']} overwrites what this one returned: each call "
                             "gives an array of its own",
           lambda case, got: not any(rank.get("overwritten") for rank in got)),
]
