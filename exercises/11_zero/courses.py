"""What steps of chapter 11 lead to, rightly and with known mistakes: in float64, with all ranks' numbers at hand."""

import numpy as np


def share_of(n, ranks):
    return -(-n // ranks)


def padded(x, ranks):
    """Rows: the ranks' parts of x, with zeros behind the last element."""
    whole = np.zeros(ranks * share_of(x.size, ranks))
    whole[:x.size] = x
    return whole.reshape(ranks, -1)


# ---------------------------------------------------------------- 11.1

def adam(case, grads, x, remembered=lambda grads: grads, clock=lambda t: t, corrected=True,
         below=lambda root, eps, grown: root + eps):
    """What is taken from x in the step after so many gradients: moments as weighted sums.

    below  what m̂ is divided by, of √v̂, eps and √(1-β₂ᵗ)
    """
    beta1, beta2 = case[0]["betas"]
    t, known = len(grads), remembered(grads)
    m = sum((1 - beta1) * beta1 ** i * g for i, g in enumerate(known[::-1]))
    v = sum((1 - beta2) * beta2 ** i * g * g for i, g in enumerate(known[::-1]))
    if corrected:
        m, v = m / (1 - beta1 ** clock(t)), v / (1 - beta2 ** clock(t))
    return case[0]["lr"] * m / below(np.sqrt(v), case[0]["eps"], np.sqrt(1 - beta2 ** clock(t)))


def summed(case):
    return [sum(g) for g in zip(*(rank["grads"] for rank in case), strict=True)]


def averaged(case):
    return [g / len(case) for g in summed(case)]


def own_parts(case):
    """Each rank steps its part with its own gradient."""
    ranks, n = len(case), case[0]["x"].size
    owner = np.minimum(np.arange(n) // share_of(n, ranks), ranks - 1)
    return [np.stack(g)[owner, np.arange(n)] for g in zip(*(rank["grads"] for rank in case), strict=True)]


def stepped(case, grads=summed, put=lambda case, x, step: x - step, **options):
    """x after each step. put(case, x, what is taken from it): how parts are taken and collected."""
    found, x, grads = [], case[0]["x"], grads(case)
    for t in range(1, len(grads) + 1):
        x = put(case, x, adam(case, grads[:t], x, **options))
        found.append(x)
    return found


def everywhere(xs, case, **more):
    return [{"xs": xs, **more} for _ in case]


def neighbours_part(case, x, step):
    """Rank r steps the part of rank r+1, and gives it out as its own."""
    n, ranks = x.size, len(case)
    return (np.roll(padded(x, ranks), -1, 0) - padded(step, ranks)).ravel()[:n]


def every_nth(case, x, step):
    """Rank r steps the elements r, r+N, …; they are collected as if they were one behind the other."""
    n, ranks = x.size, len(case)
    return (padded(x, ranks).reshape(-1, ranks).T - padded(step, ranks)).ravel()[:n]


def as_even_as_can_be(x, ranks):
    """Parts that differ by an element at most, each padded for itself."""
    parts = np.zeros((ranks, share_of(x.size, ranks)))
    for row, values in zip(parts, np.array_split(x, ranks), strict=True):
        row[:values.size] = values
    return parts


def padding_between(case, x, step):
    return as_even_as_can_be(x - step, len(case)).ravel()[:x.size]


def tail_left(case):
    """n // N elements each: the last n % N are nobody's."""
    n, ranks = case[0]["x"].size, len(case)
    keep = n // ranks * ranks
    xs = [np.concatenate([x[:keep], case[0]["x"][keep:]]) for x in stepped(case)]
    return everywhere(xs, case, parts=list(case[0]["x"][:keep].reshape(ranks, -1)))


def only_own_is_new(case, behind):
    """Each rank has its own part's steps; the others' as they were `behind` steps before (None: at the beginning)."""
    n, ranks = case[0]["x"].size, len(case)
    xs = [case[0]["x"], *stepped(case)]
    owner = np.arange(n) // share_of(n, ranks)
    return [{"xs": [np.where(owner == rank, xs[t], xs[0 if behind is None else t - behind])
                    for t in range(1, len(xs))]} for rank in range(ranks)]


# ---------------------------------------------------------------- 11.2

def parameters(case):
    """All ranks' shards of each unit, one behind the other."""
    return [np.concatenate([rank["shards"][i] for rank in case]) for i in range(len(case[0]["shapes"]))]


def cut(w, shape):
    inputs, outputs = shape
    return w[:inputs * outputs].reshape(shape), w[inputs * outputs:(inputs + 1) * outputs]


def through(shapes, forward_w, backward_w, x, ct):
    """(y, cotangent of x, the units' gradients) of one rank's samples, which may be none."""
    inputs, grads = [], [None] * len(shapes)
    for w, shape in zip(forward_w, shapes, strict=True):
        inputs.append(x)
        matrix, bias = cut(w, shape)
        x = np.tanh(np.einsum("ni,ij->nj", x, matrix) + bias)
    y = x
    for i in reversed(range(len(shapes))):
        matrix, bias = cut(backward_w[i], shapes[i])
        inner = ct * (1 - np.tanh(np.einsum("ni,ij->nj", inputs[i], matrix) + bias) ** 2)
        grads[i] = np.concatenate([np.einsum("ni,nj->ij", inputs[i], inner).ravel(), inner.sum(0)])
        ct = np.einsum("nj,ij->ni", inner, matrix)
    return y, ct, grads


def descended(case, share=lambda owns, rank: sum(owns), backward=lambda case, ws: ws, old=False, adds_up=False):
    """All that the drive notes of some steps. share: a rank's gradient, of all ranks' own ones; backward: the
    parameters that it sees; old: all passes see the first ones; adds_up: gradients stay from step to step."""
    ranks, shapes, first = len(case), case[0]["shapes"], parameters(case)
    ws, found = first, [{"ys": [], "cts": [], "grads": []} for _ in case]
    last = [[0.0] * len(shapes) for _ in case]
    for step in range(len(case[0]["xs"])):
        seen, owns = first if old else ws, []
        for rank, inputs in enumerate(case):
            y, ct, own = through(shapes, seen, backward(case, seen), inputs["xs"][step], inputs["cts"][step])
            found[rank]["ys"].append(y)
            found[rank]["cts"].append(ct)
            owns.append(own)
        for rank in range(ranks):
            mine = [padded(share([own[i] for own in owns], rank), ranks)[rank] for i in range(len(shapes))]
            last[rank] = [a + b for a, b in zip(mine, last[rank], strict=True)] if adds_up else mine
            found[rank]["grads"].append(last[rank])
        ws = [w - case[0]["lr"] * np.concatenate([last[rank][i] for rank in range(ranks)]) for i, w in enumerate(ws)]
    for rank in range(ranks):
        found[rank]["shards"] = [[w.reshape(ranks, -1)[rank] for w in ws]]
    return found


def last_of_its_size(case, ws):
    """Backward finds what was gathered last into a buffer that units of one size share."""
    return [[other for other in ws if other.size == w.size][-1] for w in ws]


# ---------------------------------------------------------------- 11.3
